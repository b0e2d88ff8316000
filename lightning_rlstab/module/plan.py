"""The sizes that tie prompts, completions and micro-batches together."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rlstab.core.checks import integer, refusal

__all__ = ["RolloutPlan"]


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """The sizes that tie prompts, completions and micro-batches together; TRL's names, all per rank.

    Attributes:
        num_generations: Completions per prompt, at least 2: a group of one has no advantage.
        per_device_train_batch_size: Completions per micro-batch.
        steps_per_generation: Micro-batches that one generation batch is cut into.
        num_iterations: Times each generation batch is trained on.
        num_generations_eval: Completions per held-out prompt; None for ``num_generations``.
        per_device_eval_batch_size: Completions per held-out batch; None for as many prompts as in training.

    Example:
        >>> plan = RolloutPlan(num_generations=4, per_device_train_batch_size=8, steps_per_generation=2)
        >>> plan.prompts_per_generation, plan.cycle_length
        (4, 2)
    """

    num_generations: int
    per_device_train_batch_size: int
    steps_per_generation: int = 1
    num_iterations: int = 1
    num_generations_eval: int | None = None
    per_device_eval_batch_size: int | None = None

    def __post_init__(self) -> None:
        advice = "A group of one has no advantage to learn from"
        integer("num_generations", self.num_generations, at_least=2, advice=advice)
        integer("per_device_train_batch_size", self.per_device_train_batch_size, at_least=1)
        integer("steps_per_generation", self.steps_per_generation, at_least=1)
        integer("num_iterations", self.num_iterations, at_least=1)
        if self.completions_per_generation % self.num_generations:
            nearest = -(-self.completions_per_generation // self.num_generations) * self.num_generations
            raise ValueError(
                "`per_device_train_batch_size` * `steps_per_generation` must be divisible by `num_generations` "
                f"({self.num_generations}) so that every rank holds whole groups, got "
                f"{self.per_device_train_batch_size} * {self.steps_per_generation} = "
                f"{self.completions_per_generation}. "
                f"Make the product {nearest}, or choose `num_generations` among its divisors."
            )
        if self.num_generations_eval is not None:
            integer("num_generations_eval", self.num_generations_eval, at_least=1)
        if self.per_device_eval_batch_size is not None:
            integer("per_device_eval_batch_size", self.per_device_eval_batch_size, at_least=1)
            if self.per_device_eval_batch_size % self.eval_generations:
                raise refusal(
                    "per_device_eval_batch_size",
                    f"be divisible by the completions per held-out prompt ({self.eval_generations})",
                    self.per_device_eval_batch_size,
                    "Set `num_generations_eval` or the batch size",
                )

    @property
    def completions_per_generation(self) -> int:
        """Completions that one rank samples for one generation batch."""
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """Prompts that one rank samples from for one generation batch."""
        return self.completions_per_generation // self.num_generations

    @property
    def cycle_length(self) -> int:
        """Micro-batches from one sampling to the next."""
        return self.steps_per_generation * self.num_iterations

    @property
    def eval_generations(self) -> int:
        """Completions per held-out prompt."""
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval

    @property
    def eval_prompts(self) -> int:
        """Held-out prompts per rank and batch."""
        if self.per_device_eval_batch_size is None:
            return self.prompts_per_generation
        return self.per_device_eval_batch_size // self.eval_generations
