"""GRPO itself, called as its rivals are, with what it spends in the same ledger. The algorithm is `grpo_core.grpo.train`."""

import dataclasses

from grpo_core.config import GRPOConfig
from grpo_core.grpo import train
from grpo_core.rivals.budget import Budget, Ledger


def train_grpo(task, policy, budget: Budget = Budget(), config: GRPOConfig = GRPOConfig()) -> Ledger:
    """Train a policy with GRPO, in place. What the budget says overrides the config."""
    shared = {name: value for name, value in vars(budget).items() if hasattr(config, name)}
    config = dataclasses.replace(config, **shared, inner_epochs=budget.inner_epochs, evaluate_every=budget.iterations)
    ledger = Ledger(task, policy, budget)

    def count(row, rollout):
        if rollout is not None:
            ledger.sampled(rollout)
            ledger.spent["gradient_steps"] += config.inner_epochs
            ledger.spent["tokens"] += config.inner_epochs * int(rollout.completion_mask.sum())
            ledger.measure(reward=row["reward"])

    train(task, policy, config, on_iteration=count)
    return ledger
