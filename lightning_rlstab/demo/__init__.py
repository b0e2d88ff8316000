"""A tiny policy that learns to add two-digit numbers: warm start, GRPO through the command line's own path, figures.

``python -m lightning_rlstab.demo`` runs the whole story on two processor cores. What its YAML names is importable:
``digits.addition_rows`` (prompts), ``digits.exact_sum`` and ``digits.digit_share`` (rewards).
"""
