"""The study of baselines: the list of completions against an oracle, variances against all groups that there are."""

import copy
import dataclasses
import math
from itertools import product

import pandas as pd
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from grpo_core import Problem, TinyGPT, success_probability, warm_start
from grpo_core.rivals.baselines import (
    BASELINES,
    Enumerated,
    constant_baseline,
    enumerate_completions,
    gradient_noise,
    gradient_scale,
    gradient_variance,
    leave_one_out_variance,
    predicted_values,
    ratio_of_means,
    squared_scores,
    value_errors,
    value_logits,
    variance_of,
)
from grpo_core.studies.baselines import baselines_figure, write

BATCH_MEAN = 0.3
TEMPERATURE = 1.3


@pytest.fixture
def listed(letters, tiny):
    """All fifteen completions of a prompt, without a threshold."""
    return enumerate_completions(tiny(), letters, letters.problems[1], TEMPERATURE, threshold=1e-30)


@pytest.fixture
def scores(letters, tiny, gradient, listed):
    """(15, weights) by one gradient of the plain definition after the other, in the order of `listed`."""
    policy, rows = tiny(), {}
    for i, (ids, mask) in enumerate(zip(*letters.completions())):
        log_prob = letters.log_probs(policy, "bba", TEMPERATURE)[i][mask].sum()
        rows[letters.decode(ids[mask].tolist())] = gradient(log_prob, policy)
    return torch.stack([rows[text] for text in listed.texts])


def two_answers(p, right=2.0, wrong=2.0):
    """A prompt with one right and one wrong completion, whose scores have these squared norms and cancel on average."""
    gram = torch.tensor([[right, -math.sqrt(right * wrong)], [-math.sqrt(right * wrong), wrong]], dtype=torch.float64)
    chances, rewards = torch.tensor([p, 1 - p], dtype=torch.float64), torch.tensor([1.0, 0], dtype=torch.float64)
    return Enumerated(Problem("", ""), ["right", "wrong"], chances, rewards, gram)


# ---- the list


def test_the_list_holds_each_completion_with_its_probability_reward_and_score(letters, tiny, listed, scores):
    log_probs, (ids, mask) = letters.log_probs(tiny(), "bba", TEMPERATURE), letters.completions()
    chances = torch.where(mask, log_probs, 0.0).sum(1).exp()
    expected = {letters.decode(row[real].tolist()): chance.item() for row, real, chance in zip(ids, mask, chances)}
    assert dict(zip(listed.texts, listed.probabilities.tolist())) == pytest.approx(expected) and len(expected) == 15
    assert listed.probabilities.tolist() == pytest.approx(sorted(expected.values(), reverse=True))
    assert listed.mass == pytest.approx(1) and listed.rewards.tolist() == [text == "bb;" for text in listed.texts]
    assert listed.value == pytest.approx(success_probability(tiny(), letters, [letters.problems[1]], TEMPERATURE).item())
    assert_close(listed.gram, scores @ scores.T)


def test_scores_are_zero_on_average(listed):
    mean_square = (listed.weights @ listed.gram @ listed.weights).item()
    assert abs(mean_square) < 1e-12 * listed.gram.diagonal().max()


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.2])
def test_a_threshold_leaves_out_the_rare_and_only_those(letters, tiny, listed, threshold):
    kept = enumerate_completions(tiny(), letters, letters.problems[1], TEMPERATURE, threshold)
    likely = [text for text, chance in zip(listed.texts, listed.probabilities.tolist()) if chance >= threshold]
    assert kept.texts == likely and kept.mass == pytest.approx(listed.probabilities[: len(likely)].sum().item())
    assert kept.weights.sum().item() == pytest.approx(1)


def test_nothing_is_likely_enough(letters, tiny):
    with pytest.raises(ValueError, match="lower the threshold"):
        enumerate_completions(tiny(), letters, letters.problems[0], threshold=0.999)


def test_the_start_policy_says_a_few_things_only(task):
    policy, problem = warm_start(), task.held_out[0]
    listed = enumerate_completions(policy, task, problem)
    assert listed.mass > 0.99 and len(listed.texts) < 100
    assert listed.value == pytest.approx(success_probability(policy, task, [problem], 0.7).item(), abs=0.01)
    mean = (listed.weights @ listed.gram @ listed.weights).item()
    assert mean < 1e-3 * (listed.weights @ listed.gram.diagonal()).item()  # Up to the missing mass.


# ---- variances


def every_group(listed, scores, baseline, group_size, offset):
    """Mean and total variance of the group's gradient, over all groups that can be drawn."""
    rewards, squares = listed.rewards + offset, scores.square().sum(1)
    best = (listed.weights * rewards * squares).sum() / (listed.weights * squares).sum()
    groups = torch.tensor(list(product(range(len(rewards)), repeat=group_size)))
    chance = listed.weights[groups].prod(1)
    drawn = rewards[groups]
    taken_off = {
        "none": torch.zeros(()),
        "batch mean": torch.tensor(BATCH_MEAN + offset),
        "group mean": drawn.mean(1, keepdim=True),
        "leave one out": (drawn.sum(1, keepdim=True) - drawn) / (group_size - 1),
        "exact value": listed.weights @ rewards,
        "best constant": best,
    }[baseline]
    gradients = ((drawn - taken_off)[..., None] * scores[groups]).mean(1)
    mean = chance @ gradients
    return mean, (chance @ gradients.square().sum(1) - mean @ mean).item()


def test_mean_and_variance_are_those_of_all_groups(listed, scores):
    basis = torch.linalg.qr(scores.T).R.T  # The same inner products in 15 numbers each.
    exact = (listed.weights * listed.rewards) @ basis
    assert exact.norm() > 1e-3
    for baseline, group_size, offset in product(BASELINES, (2, 3), (0.0, 5.0, -1.0)):
        mean, variance = every_group(listed, basis, baseline, group_size, offset)
        assert gradient_variance(listed, baseline, group_size, offset, BATCH_MEAN) == pytest.approx(variance), baseline
        assert_close(mean, gradient_scale(baseline, group_size) * exact, atol=1e-9, rtol=0)


def test_a_larger_group_leaves_out_less_and_a_constant_divides_by_the_group(listed):
    for baseline in ("none", "batch mean", "exact value", "best constant"):
        two, eight = (gradient_variance(listed, baseline, size, 0.0, BATCH_MEAN) for size in (2, 8))
        assert two == pytest.approx(4 * eight)
    noise = [gradient_variance(listed, "leave one out", size) * size for size in (2, 4, 16, 10**6)]
    assert noise == sorted(noise, reverse=True)
    exact = gradient_variance(listed, "exact value", 2) * 2
    assert noise[-1] == pytest.approx(exact, rel=1e-4)  # The others' mean becomes the exact value.


@pytest.mark.parametrize("offset", [5.0, -1.0, 1000.0])
def test_every_baseline_that_follows_the_rewards_removes_an_offset(listed, offset):
    for baseline in BASELINES[1:]:
        moved = gradient_variance(listed, baseline, 8, offset, BATCH_MEAN)
        assert moved == pytest.approx(gradient_variance(listed, baseline, 8, 0.0, BATCH_MEAN), rel=1e-6)
    assert gradient_variance(listed, "none", 8, offset) > gradient_variance(listed, "best constant", 8)


def test_no_constant_is_quieter_than_the_best_one(listed):
    best = constant_baseline(listed, "best constant")
    quietest = gradient_variance(listed, "best constant", 2)
    for b in (best - 0.5, best - 0.01, best + 0.01, best + 0.5, listed.value, 0.0, 1.0):
        assert variance_of(listed.weights, torch.diag(listed.rewards - b), listed.gram).item() / 2 > quietest
    assert best != pytest.approx(listed.value, abs=1e-3)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_two_answers_have_no_noise_at_the_best_constant_which_is_one_minus_p(p):
    """One weight, log p its sigmoid: scores 1 − p and − p. At b = 1 − p both completions give the same step."""
    listed = two_answers(p, (1 - p) ** 2, p**2)
    assert constant_baseline(listed, "best constant") == pytest.approx(1 - p)
    assert gradient_variance(listed, "best constant", 4) == pytest.approx(0, abs=1e-12)
    assert gradient_variance(listed, "exact value", 4) == pytest.approx(p * (1 - p) * (1 - 2 * p) ** 2 / 4)
    assert gradient_variance(listed, "none", 4) == pytest.approx(p * (1 - p) ** 3 / 4)


@pytest.mark.parametrize("right, wrong, side", [(1.0, 4.0, -1), (4.0, 1.0, 1), (2.0, 2.0, 0)])
def test_the_best_constant_lies_on_the_side_of_the_larger_scores(right, wrong, side):
    listed = two_answers(0.4, right, wrong)
    below = constant_baseline(listed, "best constant") - listed.value
    assert below == pytest.approx(0.4 * right / (0.4 * right + 0.6 * wrong) - 0.4)
    assert (below > 1e-9) - (below < -1e-9) == side
    assert squared_scores(listed) == pytest.approx((right, wrong))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"baseline": "critic"}, "baseline must be one of 'none', 'batch mean'"),
        ({"baseline": "batch mean"}, "give batch_mean"),
        ({"baseline": "none", "group_size": 1}, "group_size must be at least 2"),
    ],
)
def test_variances_that_cannot_be_computed_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        gradient_variance(two_answers(0.5), **arguments)


def test_a_sure_policy_has_no_noise():
    listed = dataclasses.replace(two_answers(1.0), probabilities=torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert leave_one_out_variance(listed.weights, listed.rewards, listed.gram, 8) == pytest.approx(0, abs=1e-12)
    assert gradient_variance(listed, "exact value", 8) == pytest.approx(0, abs=1e-12)


# ---- tables


def test_noise_table_compares_gradients_of_the_right_length():
    many = [two_answers(p, right, 4.0) for p, right in ((0.2, 1.0), (0.5, 2.0), (0.7, 3.0))]
    noise = gradient_noise(many, group_size=4).set_index(["rewards", "baseline"])
    assert len(noise) == 18
    batch_mean = (0.2 + 0.5 + 0.7) / 3
    for (_, baseline), row in noise.loc[["{5, 6}"]].iterrows():
        variances = [gradient_variance(one, baseline, 4, 5.0, batch_mean) for one in many]
        best = [gradient_variance(one, "best constant", 4) for one in many]
        assert row["variance"] == pytest.approx(sum(variances) / 3)
        assert row["ratio"] == pytest.approx(sum(variances) / sum(best) / row["scale"] ** 2)
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    plain = noise.loc["{0, 1}"]
    assert plain.loc["none", "taken_off"] == 0 and plain.loc["exact value", "taken_off"] == pytest.approx(batch_mean)
    assert plain.loc["group mean", "ratio"] == pytest.approx(plain.loc["leave one out", "ratio"])
    assert noise.loc[("{−1, 0}", "batch mean"), "taken_off"] == pytest.approx(batch_mean - 1)


def test_ratio_of_means_has_the_interval_of_repeated_experiments():
    generator = torch.Generator().manual_seed(0)
    below = torch.rand(4000, 20, generator=generator) + 0.5
    above = 2 * below + torch.randn(below.shape, generator=generator) / 4
    hits = sum(e.low < 2 < e.high for e in map(ratio_of_means, above.tolist(), below.tolist()))
    assert 0.92 < hits / 4000 < 0.98


def test_value_errors_are_those_of_theory_and_of_a_critic_that_is_a_constant_off(task):
    policy = warm_start()
    problems = task.held_out[:200]
    values = success_probability(policy, task, problems, 0.7)

    class Off(nn.Module):
        """Too high by 0.1, everywhere."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, prompt_ids):
            return (values + 0.1).logit()[:, None, None].expand(-1, prompt_ids.shape[1], -1)

    errors = value_errors(policy, task, problems, (2, 8, 32), critics=[Off()])
    assert errors["estimator"].tolist() == ["batch mean", *["group mean"] * 3, "critic"]
    assert errors["rmse"].iloc[0] == pytest.approx(errors["theory"].iloc[0]) == pytest.approx(values.std(correction=0).item())
    assert errors["rmse"].iloc[-1] == pytest.approx(0.1, abs=1e-4)
    group = errors[errors["estimator"] == "group mean"]
    assert group["theory"].tolist() == pytest.approx(
        [(values * (1 - values)).mean().sqrt().item() / size**0.5 for size in (2, 8, 32)]
    )
    assert (abs(group["rmse"] / group["theory"] - 1) < 0.25).all()
    assert ((group["rmse_low"] < group["rmse"]) & (group["rmse"] < group["rmse_high"])).all()


def test_a_critic_reads_the_last_token_of_prompts_of_any_length(letters):
    critic = TinyGPT(3, width=8, heads=2, max_length=10)
    critic.head = nn.Linear(8, 1)
    alone = torch.cat([value_logits(critic, letters, [problem]) for problem in letters.problems])
    assert_close(value_logits(critic, letters, letters.problems), alone)
    last = [critic(torch.tensor([letters.encode(problem.prompt)]))[0, -1, 0] for problem in letters.problems]
    assert_close(predicted_values(critic, letters, letters.problems), torch.stack(last).detach().sigmoid())


def test_the_study_is_written_and_shows_what_it_is_about(task, tmp_path):
    before = copy.deepcopy(warm_start().state_dict())
    write(tmp_path, seeds=(0,), prompts=8, problems=200)
    errors, noise = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("value_errors", "gradient_noise"))
    files = {"value_errors.csv", "gradient_noise.csv", "baselines.png", "settings.json"}
    assert {path.name for path in tmp_path.iterdir()} == files and len(errors) == 7
    rmse = errors.set_index(["estimator", "group_size"])["rmse"]
    batch, critic = (errors.loc[errors["estimator"] == name, "rmse"].item() for name in ("batch mean", "critic"))
    assert rmse["group mean", 8] < critic < batch < rmse["group mean", 2]
    ratio = noise.set_index(["rewards", "baseline"])["ratio"]
    assert ratio["{0, 1}", "exact value"] > 1.1  # A perfect critic is not the quietest baseline.
    assert ratio["{5, 6}", "none"] > 50
    assert all(torch.equal(x, y) for x, y in zip(before.values(), warm_start().state_dict().values()))


def test_the_figure_does_without_critics(task):
    errors = value_errors(warm_start(), task, task.held_out[:20], (2, 4))
    left, right = baselines_figure(errors, gradient_noise([two_answers(0.3, 1, 2), two_answers(0.6, 1, 3)])).axes
    assert [text.get_text() for text in right.get_yticklabels()] == list(BASELINES)
    assert "critics" not in " ".join(text.get_text() for text in left.get_legend().get_texts())
