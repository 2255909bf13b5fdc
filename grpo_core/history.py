"""What a run leaves behind: one row of measurements for each iteration, and the error that ends a run gone wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch

from grpo_core import processes
from grpo_core.advantages import flat_groups
from grpo_core.rollout import Rollout, is_eos


@dataclass
class History:
    """The rows of a run. Row 0 is the start policy; row i holds what iteration i sampled, and the accuracy after it.

    Columns (means over the iteration's completion tokens, gradient steps or completions):
        iteration: 0 is before training.
        reward: mean reward of the sampled completions.
        accuracy, accuracy_low, accuracy_high: greedy accuracy after the update, with its 95 % interval.
        kl: nats per token from the policy that sampled to the start policy, by k3; so it is 0 in row 1.
        clip_fraction: share of tokens on which the clip binds.
        flat_groups: share of groups whose rewards are all equal.
        entropy: nats per token: minus the mean log-prob of the sampled tokens.
        completion_length: tokens, EOS included.
        unfinished: share of completions without EOS.
        loss, grad_norm: mean over the gradient steps, the norm before scaling.
        seconds: wall-clock time of the iteration, evaluation included.
    """

    rows: list[dict] = field(default_factory=list)

    @property
    def frame(self) -> pd.DataFrame:
        """The rows as a table; nan where nothing was measured."""
        return pd.DataFrame(self.rows, columns=COLUMNS)


COLUMNS = [
    "iteration", "reward", "accuracy", "accuracy_low", "accuracy_high", "kl", "clip_fraction", "flat_groups", "entropy",
    "completion_length", "unfinished", "loss", "grad_norm", "seconds",
]  # fmt: skip


def describe(rollout: Rollout, eos_id: int | Sequence[int]) -> dict[str, float]:
    """The columns that can be read off a rollout before any update, of all processes together."""
    mask = rollout.completion_mask
    tokens, rows = processes.shares(mask)
    here = {
        "reward": rows * rollout.rewards.mean().item(),
        "flat_groups": rows * flat_groups(rollout.rewards).float().mean().item(),
        "entropy": tokens * -torch.where(mask, rollout.old_log_probs, 0.0).sum().item() / mask.sum().item(),
        "completion_length": rows * mask.sum(dim=1).float().mean().item(),
        "unfinished": rows * (~is_eos(rollout.completion_ids, eos_id)).all(dim=1).float().mean().item(),
    }
    return processes.add_up_numbers(here)


class TrainingDiverged(FloatingPointError):
    """A loss, gradient or logit was not finite. `history` holds the rows of the iterations before."""

    def __init__(self, iteration: int, error: Exception, config, checkpoint, history: History):
        saved = "" if checkpoint is None else f" The last good checkpoint is {checkpoint}."
        super().__init__(
            f"iteration {iteration} stopped: {error}.{saved} Likely cause: "
            f"learning_rate {config.learning_rate:g} is too high for {config.inner_epochs} inner epochs; try a tenth of it"
        )
        self.history = history
