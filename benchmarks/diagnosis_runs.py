"""Make labelled real runs of the digits policy, healthy and sick, for ``diagnosis.py --runs``.

Each run trains a warm-started policy for some tens of steps, on our trainer with the monitor attached or on TRL's
GRPOTrainer with TRL's own logs, and leaves a ``label.json`` beside them. Sick runs are made sick at a known step. Seeds
decide the half: even ones are for setting thresholds, odd ones for the figures.

Run: ``python benchmarks/diagnosis_runs.py --out DIR [--source demo|trl] [--seeds 4] [--healthy 20] [--only KIND]``.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEALTHY_STEPS = 75


@dataclass(frozen=True)
class Plan:
    """One run to be made; ``kind`` is ``"healthy"`` or a key of the source's sick kinds."""

    source: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{self.source}-{self.kind}-{self.seed}"


def plans(source: str, kinds: list[str], *, seeds: int, healthy: int) -> Iterator[Plan]:
    """Healthy and sick runs of one source, seed by seed, so that a set cut short is still a mixed one."""
    for seed in range(max(seeds, healthy)):
        if seed < healthy:
            yield Plan(source, "healthy", seed)
        if seed < seeds:
            yield from (Plan(source, kind, seed) for kind in kinds)


def onset_of(plan: Plan, kinds: list[str], *, is_slow: bool) -> int:
    """A step that differs from run to run: from 20 on, from 30 on where it takes a while to show."""
    spread = (7 * plan.seed + 5 * kinds.index(plan.kind)) % 16
    return (30 if is_slow else 20) + spread


def made(plan: Plan, folder: Path, policies: list[Path]) -> dict[str, Any]:
    """Make one run and return its label."""
    policy = policies[plan.seed // 2 % len(policies)]
    sources = {"demo": _demo, "trl": _trl}
    return sources[plan.source](plan, folder, policy)


def _demo(plan: Plan, folder: Path, policy: Path) -> dict[str, Any]:
    import _demo_sickness as demo

    sick = demo.SICK.get(plan.kind)
    settings = {} if sick else demo.HEALTHY_SETTINGS[plan.seed // 2 % len(demo.HEALTHY_SETTINGS)]
    onset = onset_of(plan, list(demo.SICK), is_slow=sick.later_steps > 20) if sick else -1
    at = demo.train(folder, policy, seed=plan.seed, steps=HEALTHY_STEPS, sick=sick, onset=onset, **settings)
    return {"causes": list(sick.causes) if sick else [], "onset": at}


def _trl(plan: Plan, folder: Path, policy: Path) -> dict[str, Any]:
    import _trl_sickness as trl_runs
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sick = trl_runs.SICK.get(plan.kind)
    settings = {} if sick else trl_runs.HEALTHY_SETTINGS[plan.seed // 2 % len(trl_runs.HEALTHY_SETTINGS)]
    onset = onset_of(plan, list(trl_runs.SICK), is_slow=sick.later_steps > 20) if sick else -1
    models = (AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy))
    is_state_file = plan.seed // 2 % 2 == 1 and not (sick and sick.restarts)
    at = trl_runs.train(
        folder,
        models,
        seed=plan.seed,
        steps=HEALTHY_STEPS,
        sick=sick,
        onset=onset,
        is_state_file=is_state_file,
        **settings,
    )
    return {"causes": list(sick.causes) if sick else [], "onset": at}


def warm_policies(folder: Path) -> list[Path]:
    """Two warm-started policies on disk, made when they are not there yet."""
    from demo_runs import warm_policy

    from lightning_rlstab.demo.policy import save_policy

    found = [folder / f"policy-{seed}" for seed in range(2)]
    for seed, path in enumerate(found):
        if not (path / "config.json").exists():
            policy, tokenizer = warm_policy(seed)
            save_policy(policy, tokenizer, path)
    return found


def quiet() -> None:
    """Leave the output to the names of runs."""
    import lightning.pytorch  # noqa: F401  # sets its loggers' level on import
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_rlstab", "trl"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()


def main() -> None:
    """Make the runs that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", choices=["demo", "trl"])
    parser.add_argument("--seeds", type=int, default=4, help="sick runs per kind")
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs per source")
    parser.add_argument("--only", help="one kind")
    options = parser.parse_args()
    quiet()
    policies = warm_policies(options.out)
    for source in [options.source] if options.source else ["demo", "trl"]:
        kinds = _kinds(source)
        for plan in plans(source, kinds, seeds=options.seeds, healthy=options.healthy):
            folder = options.out / plan.name
            if (folder / "label.json").exists() or options.only not in (None, plan.kind):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            began = time.perf_counter()
            label = {"source": source, "kind": plan.kind, "seed": plan.seed, **made(plan, folder, policies)}
            (folder / "label.json").write_text(json.dumps(label))
            print(f"{plan.name}: {time.perf_counter() - began:.0f} s", flush=True)


def _kinds(source: str) -> list[str]:
    if source == "demo":
        from _demo_sickness import SICK
    else:
        from _trl_sickness import SICK
    return list(SICK)


if __name__ == "__main__":
    main()
