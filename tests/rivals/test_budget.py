"""The budget refuses what makes no sense, the ledger counts exactly what was done, and a step is one plain clipped step."""

import math

import pytest
import torch
from torch.testing import assert_close

from grpo_core import Problem, greedy_accuracy
from grpo_core.grpo import sample_iteration
from grpo_core.rivals.budget import Budget, Ledger, adamw, gradient_step

SMALL = Budget(prompts_per_iteration=3, group_size=4, iterations=2, gradient_steps=6, temperature=1.3, max_new_tokens=3)


@pytest.fixture
def rollout(letters, tiny):
    return sample_iteration(tiny(), letters, SMALL, torch.Generator().manual_seed(0), 2)


@pytest.mark.parametrize("steps, epochs", [(20, 1), (40, 2), (160, 8)])
def test_every_method_may_sample_7680_completions(steps, epochs):
    budget = Budget(gradient_steps=steps)
    assert (budget.completions, budget.inner_epochs) == (7680, epochs)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"gradient_steps": 50}, "multiple of iterations, got 50 and 20"),
        ({"gradient_steps": 0}, "multiple of iterations"),
        ({"gradient_steps": -20}, "multiple of iterations"),
        ({"gradient_steps": 40.0}, "whole number"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"prompts_per_iteration": 0}, "prompts_per_iteration must be at least 1"),
        ({"prompts_per_iteration": True}, "whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"max_grad_norm": math.inf}, "finite"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"temperature": math.nan}, "temperature must be a positive number"),
        ({"evaluate_on": "train"}, "evaluate_on must be one of 'held_out', 'validation'"),
        ({"seed": 2**63}, "64 bits"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Budget(**setting)


def test_ledger_counts_what_was_done_and_nothing_else(letters, tiny, rollout):
    policy = tiny()
    ledger = Ledger(letters, policy, SMALL)
    assert ledger.sampled(rollout) is rollout
    ledger.sampled(rollout, verified=False)
    optimizer = adamw(policy, 1e-3)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for _ in range(3):
        ledger.step(policy.head.bias.sum(), optimizer, mask)
    ledger.spent["answers"] += 5
    ledger.measure(reward=0.25)
    start, end = ledger.rows
    assert all(start[name] == 0 for name in ("completions", "verdicts", "answers", "gradient_steps", "tokens"))
    assert {
        "completions": 24,
        "verdicts": 12,
        "answers": 5,
        "gradient_steps": 3,
        "tokens": 9,
        "reward": 0.25,
    }.items() <= end.items()
    assert ledger.frame["gradient_steps"].tolist() == [0, 3]


@pytest.mark.parametrize("where", ["held_out", "validation"])
def test_accuracy_is_measured_on_the_problems_that_the_budget_names(letters, tiny, where):
    letters.held_out, letters.validation = [Problem("ab", "a")], [Problem("ab", "a"), Problem("ba", "bb"), Problem("bb", "")]
    policy = tiny()
    row = Ledger(letters, policy, Budget(evaluate_on=where)).rows[0]
    expected = greedy_accuracy(policy, letters, getattr(letters, where))
    assert (row["accuracy"], row["accuracy_low"], row["accuracy_high"]) == (expected, expected.low, expected.high)


@pytest.mark.parametrize("limit, length", [(1.0, 1.0), (5.0, 5.0), (10.0, 5.0)])
def test_a_step_goes_down_the_gradient_and_no_further_than_the_limit(limit, length):
    weight = torch.tensor([10.0, 10.0], requires_grad=True)
    norm = gradient_step(weight @ torch.tensor([3.0, -4.0]), torch.optim.SGD([weight], lr=1.0), limit)
    assert norm == pytest.approx(5.0)
    assert_close(weight.detach(), torch.tensor([10 - 0.6 * length, 10 + 0.8 * length]), rtol=0, atol=1e-5)


def test_a_step_forgets_the_gradient_of_the_step_before():
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):
        gradient_step(0.5 * weight.sum(), optimizer, 1.0)
    assert weight.item() == -1.0


@pytest.mark.parametrize("bad", [lambda w: w.sum() * math.inf, lambda w: (w - 1).sqrt().sum(), lambda w: w.sum() + math.nan])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(FloatingPointError, match="as they were before"):
        gradient_step(bad(weight), torch.optim.AdamW([weight], lr=1.0), 1.0)
    assert weight.tolist() == [1.0, 2.0] and weight.grad is None


def test_the_optimizer_moves_nothing_that_has_no_gradient(tiny):
    """Weight decay would."""
    policy = tiny()
    before = [weight.clone() for weight in policy.parameters()]
    gradient_step(sum((0 * weight).sum() for weight in policy.parameters()), adamw(policy, 0.1), 1.0)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.parameters()))
