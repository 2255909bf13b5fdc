"""REINFORCE: make each completion more likely in proportion to its reward, less a baseline. Three baselines to choose from.

It is GRPO without ratio, clip, leash and standard deviation. With the mean of the *other* completions of the group as the
baseline it is called RLOO; TRL's RLOO keeps ratio, clip and leash. A second gradient step on the same rollout is slightly
stale, and nothing here notices.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_core.advantages import leave_one_out_advantages
from grpo_core.config import check_fields
from grpo_core.grpo import aggregate, sample_iteration
from grpo_core.rivals.budget import Budget, Ledger, adamw
from grpo_core.rollout import token_log_probs


@dataclass(frozen=True)
class ReinforceConfig:
    """The settings of REINFORCE."""

    # What is taken off each reward: nothing, the mean of the batch, or the mean of the others in its group (RLOO).
    baseline: Literal["none", "batch", "leave_one_out"] = "leave_one_out"
    # Step size of AdamW.
    learning_rate: float = 2e-4

    def __post_init__(self):
        check_fields(self)


def baseline_advantages(rewards: Tensor, baseline: str) -> Tensor:
    """Reward less baseline, (prompts, group_size).

    >>> baseline_advantages(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "batch")
    tensor([[ 0.7500, -0.2500],
            [-0.2500, -0.2500]])
    """
    if baseline == "leave_one_out":
        return leave_one_out_advantages(rewards)
    return rewards - (rewards.mean() if baseline == "batch" else 0.0)


def reinforce_loss(log_probs: Tensor, advantages: Tensor, completion_mask: Tensor) -> Tensor:
    """− advantage · log_prob, averaged over tokens. Its gradient is that of minus the expected reward, up to a factor.

    Args:
        log_probs: (N, T), differentiable.
        advantages: (N,), one for each completion.
        completion_mask: (N, T).

    Source: Williams 1992; leave-one-out: Kool et al. 2019, Ahmadian et al. 2024.
    """
    return aggregate(-advantages.unsqueeze(1) * log_probs, completion_mask)


def train_reinforce(task, policy, budget: Budget = Budget(), config: ReinforceConfig = ReinforceConfig()) -> Ledger:
    """Train a policy with REINFORCE, in place."""
    ledger, optimizer = Ledger(task, policy, budget), adamw(policy, config.learning_rate)
    generator = torch.Generator().manual_seed(budget.seed)
    for iteration in range(1, budget.iterations + 1):
        rollout = ledger.sampled(sample_iteration(policy, task, budget, generator, iteration))
        advantages = baseline_advantages(rollout.rewards, config.baseline).flatten()
        tokens = rollout.prompt_ids, rollout.completion_ids, rollout.temperature, rollout.prompt_mask
        for _ in range(budget.inner_epochs):
            loss = reinforce_loss(token_log_probs(policy, *tokens), advantages, rollout.completion_mask)
            ledger.step(loss, optimizer, rollout.completion_mask)
        ledger.measure(reward=rollout.rewards.mean().item())
    return ledger
