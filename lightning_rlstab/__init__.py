"""Stable, explainable GRPO training of language models on PyTorch Lightning."""
