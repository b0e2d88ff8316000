"""One cell of the crash test: a run of ours or of TRL's GRPOTrainer with one fault planted, and what became of it.

The two sides share weights, prompts in the same order, reward, batch, steps and optimizer settings through one
``GRPOConfig``; each samples its own completions. Ours gets the fault from FireDrill. TRL gets it from
``FaultyTrainer``: weights, optimizer, layer and gradient from the very same FireDrill, driven at the same places of
TRL's loop; log-probs, weights of tokens and advantages from the same pure function, handed to TRL's own loss; rewards
and completions by the same arithmetic on TRL's tensors.
"""

from __future__ import annotations

import math
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from _twins import grpo_config, our_trainer, trl_trainer
from demo_runs import warm_policy
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import GRPOTrainer

from lightning_rlstab.callbacks import GEPO, OPEFO, QUATRO, FireDrill, GradLoc
from lightning_rlstab.callbacks.fire_drill_faults import Fault, planted_in_inputs
from lightning_rlstab.callbacks.opefo import SecondMomentConfig, SnapshotConfig
from lightning_rlstab.callbacks.quatro import RolloutFilterConfig
from lightning_rlstab.core.policy_loss import LossInputs
from lightning_rlstab.demo.digits import addition_rows, exact_sum
from lightning_rlstab.demo.policy import digit_tokenizer, greedy_accuracy, save_policy
from lightning_rlstab.module.generation import HFSampler
from lightning_rlstab.report.events import read_events
from lightning_rlstab.strategies import RLStabSingleDevice

__all__ = ["CLEAN", "FAULT_STEP", "LASTING", "SETUPS", "STEPS", "Run", "Task", "digits_task", "run_cell", "words_task"]

STEPS = 40
FAULT_STEP = 17  # between two snapshots
BATCH = 32
LASTING = {"repeated_output": 4, "all_truncated": 4, "reward_hacking": 4}
"""Steps that a fault lasts which is a state of the data and not an accident; every other one strikes once."""

HELD_OUT = 1024
CLEAN = "clean"
SETUPS = ("trl", "bare", "gepo", "opefo", "quatro", "gradloc", "all")

READ_ONLY_WITH: Mapping[str, dict[str, Any]] = {
    "behavior_logprob_neg_inf": {"use_vllm": True},
    "all_truncated": {"mask_truncated_completions": True},
}
"""Settings without which nothing in the loss reads what the fault spoils; on both sides, for these faults only."""


@dataclass(frozen=True)
class Task:
    """What is learnt, and how well.

    Attributes:
        model: Directory of the policy that every run starts from.
        tokenizer: Its tokenizer.
        rows: Prompts in order.
        reward: The reward function.
        accuracy: Held-out score of a policy, in [0, 1].
        fields: Of ``GRPOConfig``.
        steps: Optimizer steps.
        fault_step: Where the fault strikes, the first step being 0.
        warmup_steps: Of GEPO's guard and of GradLoc's trigger.
        is_short: Whether completions have a few tokens only.
    """

    model: str
    tokenizer: Any
    rows: list[dict[str, Any]]
    reward: Callable[..., list[float]]
    accuracy: Callable[[nn.Module], float]
    fields: Mapping[str, Any]
    steps: int = STEPS
    fault_step: int = FAULT_STEP
    warmup_steps: int = 10
    is_short: bool = False


@dataclass
class Run:
    """What one run left behind.

    Attributes:
        setup: One of ``SETUPS``.
        fault: A kind of fault, or ``CLEAN``.
        seed: Of policy, prompts and samples.
        accuracy: Held-out score at the end; None when the run raised or its weights are not finite.
        start_accuracy: Held-out score before the first step.
        died_at: First step after which the weights were not finite, or step at which the run raised.
        error: What it raised, in a line.
        lost_steps: Steps that a guard skipped or a rollback undid.
        acts: Events of the guards by kind and source.
        seconds: Of the run and its evaluation.
        steps: Optimizer steps of a whole run.
        fault_step: Where the fault struck.
    """

    setup: str
    fault: str
    seed: int
    accuracy: float | None = None
    start_accuracy: float = 0.0
    died_at: int | None = None
    error: str = ""
    lost_steps: list[int] = field(default_factory=list)
    acts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = STEPS
    fault_step: int = FAULT_STEP


def digits_task(seed: int, folder: Path) -> Task:
    """Two-digit additions; the warm-started policy of a seed is made once and kept in ``folder``."""
    directory = folder / f"digits-{seed}"
    if not (directory / "config.json").exists():
        policy, tokenizer = warm_policy(seed)
        save_policy(policy, tokenizer, directory)
    tokenizer = digit_tokenizer()
    held_out = addition_rows(HELD_OUT, split="held_out")
    return Task(
        model=str(directory),
        tokenizer=tokenizer,
        rows=addition_rows(seed=seed),
        reward=exact_sum,
        accuracy=lambda policy: greedy_accuracy(policy, tokenizer, held_out),
        fields={
            "num_generations": 8,
            "per_device_train_batch_size": BATCH,
            "max_completion_length": 4,
            "learning_rate": 3e-4,
            "lr_scheduler_type": "constant",
            "seed": seed,
        },
        is_short=True,
    )


def words_task(seed: int, model: Path) -> Task:
    """Sums and differences of one-digit numbers, asked in words of a chat model from a directory; eight steps."""
    from transformers import AutoTokenizer

    from lightning_rlstab.demo.arithmetic import last_number_score, task_rows

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, padding_side="left")
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    held_out = task_rows("chain_sum", 32, seed=1, split="held_out", task_kwargs=sums)

    def accuracy(policy: Any) -> float:
        texts = [
            tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in held_out
        ]
        batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        policy.eval()
        with torch.no_grad():
            lines = policy.generate(**batch, do_sample=False, max_new_tokens=16)
        answers = tokenizer.batch_decode(lines[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        columns = {name: [row[name] for row in held_out] for name in ("task", "entry")}
        scores = last_number_score(answers, **columns)
        return sum(score >= 1.0 for score in scores) / len(scores)

    return Task(
        model=str(model),
        tokenizer=tokenizer,
        rows=task_rows("chain_sum", 148, seed=seed, task_kwargs=sums),
        reward=last_number_score,
        accuracy=accuracy,
        fields={
            "num_generations": 8,
            "per_device_train_batch_size": 16,
            "max_completion_length": 16,
            "temperature": 0.7,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "seed": seed,
        },
        steps=8,
        fault_step=4,
        warmup_steps=3,
    )


def guards(setup: str, task: Task) -> list[pl.Callback]:
    """The callbacks of a set-up: defaults, but for what counts steps, which is scaled to the length of the run."""
    rhythm = max(1, task.steps // 8)  # 5 of 40 steps
    snapshots = SnapshotConfig(every_steps=rhythm, recovery_steps=rhythm)
    layers: dict[str, Callable[[], pl.Callback]] = {
        "gradloc": lambda: GradLoc(warmup_steps=task.warmup_steps),
        "gepo": lambda: GEPO() if task.warmup_steps == 10 else GEPO(guard=_guard(task.warmup_steps)),
        "opefo": lambda: OPEFO(second_moment=SecondMomentConfig(every_steps=10), snapshots=snapshots),
        # A completion has four tokens at most: the default of four to an n-gram would never see a repeated one.
        "quatro": lambda: QUATRO(filter=RolloutFilterConfig(ngram=1 if task.is_short else 4)),
    }
    return [layer() for name, layer in layers.items() if setup in (name, "all")]


def _guard(warmup_steps: int) -> Any:
    from lightning_rlstab.callbacks.gepo import StepGuardConfig

    return StepGuardConfig(warmup_steps=warmup_steps)


def planned_fault(kind: str, task: Task) -> Fault:
    """The fault of a cell, at FireDrill's default magnitude and address."""
    last = task.fault_step + LASTING.get(kind, 1) - 1
    return Fault(kind=kind, step=task.fault_step, last_step=min(last, task.steps - 1))


def run_cell(setup: str, kind: str, seed: int, task: Task, start_accuracy: float) -> Run:
    """Train once and say what became of it.

    Args:
        setup: One of ``SETUPS``.
        kind: A kind of fault, or ``CLEAN``.
        seed: Of prompts and samples.
        task: What is learnt.
        start_accuracy: Held-out score of the policy that it starts from.
    """
    run = Run(setup, kind, seed, start_accuracy=start_accuracy, steps=task.steps, fault_step=task.fault_step)
    fault = None if kind == CLEAN else planned_fault(kind, task)
    settings = dict(READ_ONLY_WITH.get(kind, {}))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        # TRL's constructor wants the vLLM package for `use_vllm`; what it switches on in the loss is switched on later.
        is_corrected = bool(settings.pop("use_vllm", False))
        fields = {**task.fields, "max_steps": task.steps, **settings}
        side = _trl_run if setup == "trl" else _our_run
        policy = side(run, fault, task, grpo_config(scratch, **fields), Path(scratch), is_corrected=is_corrected)
    if not run.error and policy is not None and _is_finite(policy):
        run.accuracy = task.accuracy(policy)
    run.seconds = round(time.perf_counter() - began, 2)
    return run


def _is_finite(policy: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in policy.parameters())


def _note_death(run: Run, error: Exception, step: int) -> None:
    run.died_at = step if run.died_at is None else run.died_at
    words = str(error).strip().splitlines() or [""]
    run.error = f"{type(error).__name__}: {words[0]}"[:300]
    if not isinstance(error, RuntimeError):  # not a guard's stop and not torch's: worth the whole story
        run.error += " | " + traceback.format_exc(limit=-2).replace("\n", " ")[:600]


# Ours -----------------------------------------------------------------------------------------------------------------


class _Recorder(pl.Callback):
    """Notes skipped steps and the step at which weights stopped being finite; last in the list."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lost: set[int] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        verdict = trainer.strategy.last_verdict
        if verdict is not None and verdict.action != "apply":
            self.lost.add(trainer.global_step - 1)
        _note_non_finite(self.run, pl_module.policy, trainer.global_step - 1)


def _note_non_finite(run: Run, policy: nn.Module, step: int) -> None:
    if _is_finite(policy):
        run.died_at = None  # a rollback has brought it back
    elif run.died_at is None:
        run.died_at = step


def _our_run(
    run: Run, fault: Fault | None, task: Task, config: Any, scratch: Path, *, is_corrected: bool
) -> nn.Module | None:
    recorder = _Recorder(run)
    drill = [] if fault is None else [FireDrill([asdict(fault)])]
    corrected: dict[str, Any] = {}
    if is_corrected:
        corrected = {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "sampler": HFSampler(task.tokenizer),
        }
    options = {"strategy": RLStabSingleDevice(), "default_root_dir": str(scratch), "inference_mode": False}
    pl.seed_everything(run.seed, verbose=False)
    trainer, module, data = our_trainer(
        config,
        task.model,
        task.tokenizer,
        task.rows,
        callbacks=[*drill, *guards(run.setup, task), recorder],
        options=options,
        reward=task.reward,
        **corrected,
    )
    try:
        trainer.fit(module, data)
    except Exception as error:  # whatever ends a run is the finding
        _note_death(run, error, trainer.global_step)
    lines = read_events(scratch / "events.jsonl") if (scratch / "events.jsonl").exists() else []
    for line in lines:
        if line["event"] == "rollback":
            origin = int(Path(line["path"]).stem.partition("=")[2])
            recorder.lost |= set(range(origin, line["step"]))
    told = Counter(
        f"{line.get('source', line['event'])}:{line['event']}"
        for line in lines
        if line["event"] not in ("fire_drill", "self_check") and line.get("is_taken") is not True
    )
    run.acts, run.lost_steps = dict(told), sorted(recorder.lost)
    return module.policy


# TRL ------------------------------------------------------------------------------------------------------------------


class FaultyTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with one fault in it; without ``fault`` it is TRL's trainer."""

    fault: Fault | None = None
    drill: FireDrill | None = None
    is_corrected = False

    def _is_due(self, place: str) -> bool:
        fault = self.fault
        return fault is not None and fault.place == place and fault.is_due(self.state.global_step)

    def _as_lightning(self, *, batches: int) -> tuple[Any, Any]:
        """What FireDrill reads of a Trainer and a module, in TRL's terms."""
        model = self.accelerator.unwrap_model(self.model)
        trainer = SimpleNamespace(
            global_step=self.state.global_step,
            global_rank=0,
            accumulate_grad_batches=self.args.gradient_accumulation_steps,
            num_training_batches=math.inf,
            optimizers=[self.optimizer],
        )
        window = [None] * ((batches - 1) % self.args.gradient_accumulation_steps + 1)
        module = SimpleNamespace(
            named_parameters=model.named_parameters, named_modules=model.named_modules, window=window
        )
        return trainer, module

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Faults of weights, optimizer, layers before it; faults of the gradient after its backward."""
        index = self._step
        if self.drill is not None:
            self.drill.on_train_batch_start(*self._as_lightning(batches=index + 1), None, index)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.drill is not None:
            self.drill.on_after_backward(*self._as_lightning(batches=index + 1))
        return loss

    # Rollout

    def _generate(self, prompts: list[Any]) -> Any:
        """Where the run corrects for the sampler, its log-probs come along, as from an engine of its own."""
        if not self.is_corrected:
            return super()._generate(prompts)
        self.use_vllm = False
        prompt_ids, completion_ids, tools, completions, _, *rest = super()._generate(prompts)
        self.use_vllm = True
        logprobs = self._sampling_logprobs(prompt_ids, completion_ids)
        if self._is_due("loss"):
            row = logprobs[self.fault.sequence or 0]  # type: ignore[union-attr]
            row[len(row) // 2] = -math.inf
        return prompt_ids, completion_ids, tools, completions, logprobs, *rest

    @torch.no_grad()
    def _sampling_logprobs(self, prompt_ids: Any, completion_ids: Any) -> list[list[float]]:
        found = []
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            ids = torch.tensor([[*prompt, *completion]])
            logprobs, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, torch.ones_like(ids), len(completion)
            )
            found.append(logprobs[0].tolist())
        return found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._is_due("rollout"):
            if self.fault.kind == "repeated_output":  # type: ignore[union-attr]
                ids, mask = output["completion_ids"], output["completion_mask"].bool()
                output["completion_ids"] = torch.where(mask, ids[:, :1].expand_as(ids), ids)
            elif self.fault.kind == "all_truncated":  # type: ignore[union-attr]
                # What `mask_truncated_completions` makes of a batch whose completions all lack an end.
                output["completion_mask"] = torch.zeros_like(output["completion_mask"])
                output["num_items_in_batch"] = torch.zeros_like(output["num_items_in_batch"])
        return output  # type: ignore[no-any-return]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._is_due("rollout"):
            fault = self.fault
            assert fault is not None
            if fault.kind in ("reward_nan", "reward_outlier"):
                rewards[fault.sequence or 0, 0] = math.nan if fault.kind == "reward_nan" else fault.size
            elif fault.kind == "reward_hacking":
                lengths = torch.tensor([float(len(ids)) for ids in completion_ids_list])
                rewards[:, 0] += fault.size * lengths / lengths.max()
        return rewards

    # Loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        fault = self.fault
        is_here = fault is not None and (
            fault.kind == "systematic_mismatch"
            or fault.micro_batch == self._step % self.args.gradient_accumulation_steps
        )
        if not self._is_due("loss") or self.is_corrected or not is_here:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        assert fault is not None
        planted = self._planted(model, inputs, fault)
        inputs = {**inputs, "advantages": planted.advantages}
        if fault.kind == "log_ratio_overflow":
            inputs["old_per_token_logps"] = planted.old_logprobs
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        # TRL's factor on token losses; only read beside vLLM.
        inputs["importance_sampling_ratio"] = planted.token_weights
        self.use_vllm = True
        try:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        finally:
            self.use_vllm = False

    @torch.no_grad()
    def _planted(self, model: Any, inputs: dict[str, Any], fault: Fault) -> LossInputs:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        logprobs, entropy, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width, compute_entropy=True)
        plain = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            completion_mask=inputs["completion_mask"].bool(),
            advantages=inputs["advantages"],
            old_logprobs=inputs.get("old_per_token_logps"),
        )
        return planted_in_inputs(fault, plain)[0]


class _TrlRecorder(TrainerCallback):  # type: ignore[misc]
    def __init__(self, run: Run, trainer: FaultyTrainer) -> None:
        self.run, self.trainer = run, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the fault down, and look at the weights."""
        trainer = self.trainer
        if trainer.drill is not None:
            accumulation = args.gradient_accumulation_steps
            fake, module = trainer._as_lightning(batches=accumulation)
            trainer.drill.on_train_batch_end(fake, module, None, None, accumulation - 1)
        _note_non_finite(self.run, trainer.model, state.global_step - 1)


def _trl_run(
    run: Run, fault: Fault | None, task: Task, config: Any, scratch: Path, *, is_corrected: bool
) -> nn.Module | None:
    trainer: FaultyTrainer = trl_trainer(
        config, task.model, task.tokenizer, task.rows, reward=task.reward, trainer_class=FaultyTrainer
    )
    trainer.fault = fault
    trainer.use_vllm = trainer.is_corrected = is_corrected
    if fault is not None and fault.place in ("weights", "optimizer", "layer", "gradient"):
        trainer.drill = FireDrill([asdict(fault)])
    trainer.add_callback(_TrlRecorder(run, trainer))
    try:
        trainer.train()
    except Exception as error:  # whatever ends a run is the finding
        _note_death(run, error, trainer.state.global_step)
    return trainer.model  # type: ignore[no-any-return]
