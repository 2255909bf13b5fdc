"""Evaluation: exact enumeration and brute force against the estimators, and intervals that say what they claim."""

import copy
import math
import pickle
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_core import Estimate, History, greedy_accuracy, pass_at_k, sample_groups, success_probability
from grpo_core.evaluate import greedy_completions, mean_estimate, proportion
from grpo_core.history import COLUMNS


def test_greedy_takes_the_most_likely_token_of_each_prompt(letters, tiny):
    for seed in range(5):
        policy, expected = tiny(seed), []
        for problem in letters.problems:
            ids = letters.encode(problem.prompt)
            while 2 not in ids and len(ids) < len(problem.prompt) + 3:
                ids.append(policy(torch.tensor([ids]))[0, -1].argmax().item())
            expected.append("".join("ab;"[i] for i in ids[len(problem.prompt) :]))
        assert greedy_completions(policy, letters, letters.problems) == expected
        right = sum(text == problem.answer + ";" for text, problem in zip(expected, letters.problems))
        assert greedy_accuracy(policy, letters, letters.problems) == pytest.approx(right / 3)


def test_evaluation_needs_problems(letters, tiny):
    with pytest.raises(ValueError, match="problems"):
        greedy_accuracy(tiny(), letters, [])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_success_probability_is_the_sum_over_all_completions(letters, tiny, temperature):
    policy, (ids, mask) = tiny(), letters.completions()
    expected = []
    for problem in letters.problems:
        p = letters.log_probs(policy, problem.prompt, temperature).where(mask, 0.0).sum(1).exp()
        right = torch.tensor([letters.verify(letters.decode(row.tolist()), problem.answer) for row in ids])
        expected.append((p * right).sum())
    assert_close(success_probability(policy, letters, letters.problems, temperature), torch.stack(expected))


@pytest.mark.parametrize("k, samples", [(1, 2), (2, 2), (1, 7), (3, 7), (7, 7)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(letters, tiny, k, samples):
    policy, again = tiny(), [torch.Generator().manual_seed(2) for _ in range(2)]
    rewards = sample_groups(policy, letters, letters.problems, samples, 1.0, generator=again[0]).rewards
    assert 0 < rewards.mean() < 1
    estimate = pass_at_k(policy, letters, letters.problems, k, samples, 1.0, again[1])
    assert estimate == pytest.approx(np.mean([[max(c) for c in combinations(row, k)] for row in rewards.tolist()]))


def test_one_sample_is_enough_for_pass_at_one(letters, tiny):
    policy, generator = tiny(), torch.Generator().manual_seed(0)
    estimates = {3 * pass_at_k(policy, letters, letters.problems, 1, 1, 1.0, generator) for _ in range(9)}
    assert len(estimates) > 1 and all(x == pytest.approx(round(x)) for x in estimates)


@pytest.mark.parametrize("k, samples", [(0, 4), (5, 4), (-1, 4)])
def test_pass_at_k_needs_as_many_samples(letters, tiny, k, samples):
    with pytest.raises(ValueError, match="k must lie between 1 and samples"):
        pass_at_k(tiny(), letters, letters.problems, k, samples, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_holds_the_proportions_that_the_count_does_not_rule_out(counts):
    successes, trials = counts
    estimate = proportion(successes, trials)
    assert 0 <= estimate.low <= estimate <= estimate.high <= 1
    for p in {estimate.low, estimate.high} - {0.0, 1.0}:  # Wilson's ends lie 1.96 of their own standard errors away.
        assert abs(estimate - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / trials), rel=1e-5)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    inside = [c for c in range(51) if proportion(c, 50).low <= 0.36 <= proportion(c, 50).high]
    assert 0.93 < sum(math.comb(50, c) * 0.36**c * 0.64 ** (50 - c) for c in inside) < 0.97


@pytest.mark.parametrize("successes, trials", [(0, 0), (2, 1), (-1, 3)])
def test_impossible_counts_are_refused(successes, trials):
    with pytest.raises(ValueError, match="successes in"):
        proportion(successes, trials)


def test_mean_has_an_interval_of_its_own_spread():
    x = [0.0, 0.5, 1.0, 1.0] * 25
    estimate, half = mean_estimate(x), 1.959964 * np.std(x, ddof=1) / 10
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.625, 0.625 - half, 0.625 + half))
    assert mean_estimate([0.3]) == 0.3 and math.isnan(mean_estimate([0.3]).low)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 31])
def test_few_values_have_the_interval_of_student(n):
    x = np.arange(n)
    t = (mean_estimate(x).high - x.mean()) / (x.std(ddof=1) / math.sqrt(n))
    u = np.linspace(0, np.arctan(t / math.sqrt(n - 1)), 10_001)  # The density of Student's t is a power of a cosine in this.
    norm = math.gamma(n / 2) / math.gamma((n - 1) / 2) / math.sqrt(math.pi)
    assert 2 * norm * np.trapezoid(np.cos(u) ** (n - 2), u) == pytest.approx(0.95, abs=2e-5)


def test_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        mean_estimate([])


def test_estimate_is_a_number_with_an_interval_and_survives_copies():
    estimate = Estimate(0.36, 0.31, 0.41)
    assert estimate + 1 == 0.36 + 1 and f"{estimate:.1%}" == "36.0%"
    assert str(estimate) == repr(estimate) == "0.360 [0.310, 0.410]"
    for twin in (copy.deepcopy(estimate), pickle.loads(pickle.dumps(estimate))):
        assert (twin.value, twin.low, twin.high) == (0.36, 0.31, 0.41)


def test_history_is_a_table_with_gaps_where_nothing_was_measured():
    frame = History([{"iteration": 0, "accuracy": 0.36}, {"iteration": 1, "reward": 0.3}]).frame
    assert list(frame) == COLUMNS and len(frame) == 2
    assert frame["accuracy"].isna().tolist() == [False, True]
    assert frame["kl"].isna().all()
    assert list(History().frame) == COLUMNS
