"""The budget that all methods share, and the ledger of what a method has spent.

A comparison is fair if everything but the method is the same: the start policy, the completions one may sample, the
gradient steps one may take. What a method needs beyond that (labels, other networks) is counted, not hidden.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from grpo_core.config import check_fields
from grpo_core.evaluate import greedy_accuracy
from grpo_core.rollout import Rollout, check_temperature


@dataclass(frozen=True)
class Budget:
    """What a method may spend. A value that makes no sense raises a ValueError that says what would."""

    # Prompts in each round of sampling; a group is sampled for each.
    prompts_per_iteration: int = 48
    # Completions in a group.
    group_size: int = 8
    # Rounds of sampling.
    iterations: int = 20
    # Gradient steps on the policy, over all rounds.
    gradient_steps: int = 40
    # Completions are sampled at this temperature.
    temperature: float = 0.7
    # A completion is cut off here.
    max_new_tokens: int = 4
    # A larger gradient is scaled down to this norm.
    max_grad_norm: float = 1.0
    # Problems to measure accuracy on: validation for choosing settings, held_out for reporting.
    evaluate_on: Literal["held_out", "validation"] = "held_out"
    # Source of all randomness.
    seed: int = 0

    def __post_init__(self):
        check_temperature(self.temperature)
        check_fields(self)
        if self.gradient_steps < 1 or self.gradient_steps % self.iterations:
            raise ValueError(
                f"gradient_steps must be a multiple of iterations, got {self.gradient_steps} and {self.iterations}: "
                "each round takes the same number of steps"
            )

    @property
    def inner_epochs(self) -> int:
        """Gradient steps in each round."""
        return self.gradient_steps // self.iterations

    @property
    def completions(self) -> int:
        """Completions sampled in all rounds."""
        return self.iterations * self.prompts_per_iteration * self.group_size


class Ledger:
    """What a method has spent, and the accuracy of its policy at that point.

    Attributes:
        rows: one for each measurement; the first is the start policy. Columns: completions (sampled), verdicts (calls of
            the verifier), answers (true answers seen, counted each time), gradient_steps (on the policy), tokens (completion
            tokens that these steps trained on), accuracy with accuracy_low and accuracy_high, and what the method adds.
    """

    def __init__(self, task, policy, budget: Budget):
        self.task, self.policy, self.budget = task, policy, budget
        self.spent = dict.fromkeys(("completions", "verdicts", "answers", "gradient_steps", "tokens"), 0)
        self.rows: list[dict] = []
        self.measure()

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def sampled(self, rollout: Rollout, verified: bool = True) -> Rollout:
        """Count a rollout, and its verdicts if the method looks at them; returns it."""
        self.spent["completions"] += len(rollout.completion_ids)
        self.spent["verdicts"] += len(rollout.completion_ids) * verified
        return rollout

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer, completion_mask: Tensor) -> None:
        """One counted gradient step on the policy."""
        gradient_step(loss, optimizer, self.budget.max_grad_norm)
        self.spent["gradient_steps"] += 1
        self.spent["tokens"] += int(completion_mask.sum())

    def measure(self, **metrics: float) -> None:
        """Add a row: all that is spent so far, what the method wants to report, and greedy accuracy."""
        problems = getattr(self.task, self.budget.evaluate_on)
        accuracy = greedy_accuracy(self.policy, self.task, problems)
        self.rows.append(self.spent | metrics | accuracy.columns("accuracy"))


def adamw(policy, learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer of every method, as in `grpo_core.grpo.train`."""
    return torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)


def gradient_step(loss: Tensor, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float:
    """Step down the gradient of `loss`, scaled down to `max_grad_norm`; returns its norm before.

    Raises:
        FloatingPointError: loss or gradient is not finite. Nothing was changed.
    """
    optimizer.zero_grad()
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not (math.isfinite(loss.item()) and math.isfinite(norm)):
        optimizer.zero_grad()
        raise FloatingPointError(f"loss {loss.item()}, gradient norm {norm}; the networks are as they were before that step")
    optimizer.step()
    return norm


def shuffled_batches(count: int, batch_size: int, batches: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of minibatches: all rows in a random order, cut up; then again in another order, and so on.

    Args:
        count: rows. With fewer than `batch_size` each batch holds all of them.
        batch_size: rows in a batch. What is left over at the end of an epoch is dropped.
        batches: how many to give.
    """
    order, size = torch.empty(0, dtype=torch.long), min(batch_size, count)
    for _ in range(batches):
        if len(order) < size:
            order = torch.randperm(count, generator=generator)
        batch, order = order[:size], order[size:]
        yield batch
