"""GRPO in the ledger is GRPO: the same weights as `train`, and what it spent."""

import torch

from grpo_core import GRPOConfig, train, warm_start
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.grpo import train_grpo


def test_it_is_train_and_its_expenses(task):
    budget = Budget(prompts_per_iteration=4, group_size=4, iterations=2, gradient_steps=6, seed=3)
    counted, plain = warm_start(), warm_start()
    ledger = train_grpo(task, counted, budget, GRPOConfig(learning_rate=1e-3))
    lengths = []
    config = GRPOConfig(prompts_per_iteration=4, group_size=4, iterations=2, inner_epochs=3, seed=3, learning_rate=1e-3)
    history = train(task, plain, config, lambda row, r: lengths.append(0 if r is None else int(r.completion_mask.sum())))
    assert all(torch.equal(*pair) for pair in zip(counted.parameters(), plain.parameters()))
    assert [row["completions"] for row in ledger.rows] == [row["verdicts"] for row in ledger.rows] == [0, 16, 32]
    assert [row["gradient_steps"] for row in ledger.rows] == [0, 3, 6]
    assert ledger.rows[-1]["tokens"] == 3 * sum(lengths) and ledger.rows[-1]["answers"] == 0
    assert ledger.rows[-1]["accuracy"] == history.rows[-1]["accuracy"]
