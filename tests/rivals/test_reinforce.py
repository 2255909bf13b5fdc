"""REINFORCE: its baselines by brute force, its gradient by enumeration, and what a random reward teaches: nothing."""

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_core import success_probability, token_log_probs
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.reinforce import ReinforceConfig, baseline_advantages, reinforce_loss, train_reinforce

SMALL = Budget(prompts_per_iteration=3, group_size=4, iterations=2, gradient_steps=6, temperature=1.3, max_new_tokens=3)
BASELINES = ("none", "batch", "leave_one_out")
groups = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.lists(st.floats(-9, 9, width=32), min_size=size, max_size=size), min_size=1, max_size=4)
)


@given(groups)
def test_baselines_are_those_of_the_plain_definition(rewards):
    flat = [reward for group in rewards for reward in group]
    others = [[sum(group[:i] + group[i + 1 :]) / (len(group) - 1) for i in range(len(group))] for group in rewards]
    by_hand = {
        "none": rewards,
        "batch": [[reward - sum(flat) / len(flat) for reward in group] for group in rewards],
        "leave_one_out": [[reward - b for reward, b in zip(group, others[i])] for i, group in enumerate(rewards)],
    }
    for baseline in BASELINES:
        assert_close(baseline_advantages(torch.tensor(rewards), baseline), torch.tensor(by_hand[baseline]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("offset", [-1.0, 5.0, 100.0])
def test_a_mean_removes_any_offset_and_no_baseline_does_not(offset):
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.float64)
    for baseline in ("batch", "leave_one_out"):
        assert_close(baseline_advantages(rewards + offset, baseline), baseline_advantages(rewards, baseline))
    assert_close(baseline_advantages(rewards + offset, "none"), rewards + offset)


def test_loss_and_its_gradient_by_hand_and_nothing_is_read_behind_the_eos():
    log_probs = torch.tensor([[-1.0, -2.0, -torch.inf], [-0.5, torch.inf, torch.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss = reinforce_loss(log_probs, torch.tensor([2.0, -3.0]), mask)
    loss.backward()
    assert loss.item() == pytest.approx((2 * 1 + 2 * 2 - 3 * 0.5) / 3)
    assert_close(log_probs.grad, torch.tensor([[-2.0, -2, 0], [3, 0, 0]]) / 3)


def expected_gradient(letters, policy, problem, rewards, baseline, gradient):
    """Of minus the loss, times its number of tokens, over 2: exact, by enumerating all groups of two completions."""
    ids, mask = letters.completions()
    prompt = torch.tensor([letters.encode(problem.prompt)]).expand(len(ids), -1)
    log_probs = token_log_probs(policy, prompt, ids)
    chance = torch.where(mask, log_probs, 0.0).sum(1).exp().detach()
    total = 0
    for pair in map(list, product(range(len(ids)), repeat=2)):
        advantages = baseline_advantages(rewards[pair][None], baseline)[0]
        loss = reinforce_loss(log_probs[pair], advantages, mask[pair])
        total = total - chance[pair].prod() * loss * mask[pair].sum() / 2
    return gradient(total, policy)


def exact_gradient(letters, policy, problem, gradient):
    prompt, answer = (torch.tensor([letters.encode(text)]) for text in (problem.prompt, problem.answer + ";"))
    return gradient(token_log_probs(policy, prompt, answer).sum().exp(), policy)


@pytest.mark.parametrize("baseline, shrinks_to", [("none", 1.0), ("leave_one_out", 1.0), ("batch", 0.5)])
def test_expected_step_is_along_the_exact_gradient(letters, tiny, gradient, baseline, shrinks_to):
    """The mean of a group, or of a batch of one group, holds each completion's own reward: 1 − 1/G of the gradient is left."""
    policy, problem = tiny(), letters.problems[1]
    rewards = torch.tensor([letters.verify(letters.decode(row.tolist()), problem.answer) for row in letters.completions()[0]])
    found = expected_gradient(letters, policy, problem, rewards.double(), baseline, gradient)
    assert_close(found, shrinks_to * exact_gradient(letters, policy, problem, gradient))
    assert found.norm() > 1e-3


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_reward_that_does_not_look_at_the_completion_has_no_expected_gradient(letters, tiny, gradient, baseline):
    """The control of every claim that training helped: pay by the toss of a coin, whichever way it falls."""
    for reward in (0.0, 1.0):
        rewards = torch.full((len(letters.completions()[0]),), reward, dtype=torch.float64)
        found = expected_gradient(letters, tiny(), letters.problems[1], rewards, baseline, gradient)
        assert found.abs().max() < 1e-12


@pytest.mark.parametrize("baseline", BASELINES)
def test_training_spends_exactly_its_budget_and_finds_the_answers(letters, tiny, baseline):
    policy = tiny()
    budget = dataclasses.replace(
        SMALL, prompts_per_iteration=3, group_size=16, iterations=30, gradient_steps=60, temperature=1.0
    )
    before = success_probability(policy, letters, letters.train).mean()
    ledger = train_reinforce(letters, policy, budget, ReinforceConfig(baseline, learning_rate=1e-2))
    assert success_probability(policy, letters, letters.train).mean() > before + 0.1
    last = ledger.rows[-1]
    assert (last["completions"], last["verdicts"], last["answers"], last["gradient_steps"]) == (1440, 1440, 0, 60)
    assert len(ledger.rows) == 31 and ledger.frame["gradient_steps"].diff().dropna().eq(2).all()


def test_the_same_seed_gives_the_same_run_and_tokens_are_counted_once_a_step(letters, tiny):
    runs = [train_reinforce(letters, tiny(), SMALL) for _ in range(2)]
    assert runs[0].rows == runs[1].rows
    tokens = runs[0].frame["tokens"].diff().dropna() / 3  # Three steps on the same 12 completions of one to three tokens.
    assert tokens.between(12, 36).all() and (tokens == tokens.round()).all()


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="baseline must be one of 'none', 'batch', 'leave_one_out'"):
        ReinforceConfig("group")
    with pytest.raises(ValueError, match="learning_rate must be above 0"):
        ReinforceConfig(learning_rate=0.0)
