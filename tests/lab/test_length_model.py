"""The policy that only decides when to stop: its probabilities against closed forms, its drift against exact sums."""

import math

import pytest
import torch
from torch.testing import assert_close

from grpo_core import aggregate
from grpo_core.lab.length_model import START_LENGTH, answer_log_probs, mean_length, sample_lengths, train_lengths

HOWS = ("sequence", "token", "constant")


def logit(s):
    return math.log(s / (1 - s))


@pytest.mark.parametrize("s", [0.01, 0.2, 0.9])
def test_log_prob_of_an_answer_is_geometric(s):
    lengths = torch.tensor([1, 2, 7, 30])
    log_probs, mask = answer_log_probs(lengths, torch.full((4,), logit(s), dtype=torch.float64))
    assert mask.sum(dim=1).tolist() == lengths.tolist()
    totals = torch.where(mask, log_probs, 0.0).sum(dim=1)
    assert_close(totals, torch.tensor([(n - 1) * math.log(1 - s) + math.log(s) for n in lengths.tolist()], dtype=torch.float64))


@pytest.mark.parametrize("s", [0.02, 0.2, 0.5, 0.999])
def test_sampled_lengths_have_the_geometric_distribution(s):
    n = 200_000
    lengths = sample_lengths(torch.full((n,), logit(s)), torch.Generator().manual_seed(0))
    assert lengths.min() == 1
    for k in range(1, 6):
        exact = (1 - s) ** (k - 1) * s
        measured = (lengths == k).float().mean().item()
        assert measured == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / n) + 1e-9), k
    assert lengths.float().mean().item() == pytest.approx(1 / s, abs=5 * math.sqrt((1 - s) / n) / s + 1e-4)


def test_rarest_random_number_gives_a_length_too(monkeypatch):
    """torch.rand may return exactly 0, and log 0 is no length."""
    monkeypatch.setattr(torch, "rand", lambda shape, generator: torch.zeros(shape))
    assert sample_lengths(torch.full((3,), logit(0.2)), torch.Generator()).tolist() == [1, 1, 1]


def test_rows_have_their_own_stop_probability():
    logits = torch.tensor([logit(0.9), logit(0.05)]).repeat(20_000)
    lengths = sample_lengths(logits, torch.Generator().manual_seed(1)).float()
    assert lengths[::2].mean().item() == pytest.approx(1 / 0.9, rel=0.02)
    assert lengths[1::2].mean().item() == pytest.approx(20, rel=0.03)


def test_gradient_of_each_average_is_the_closed_form():
    """d log π / d logit(s) = 1 − L s, with the weight 1/L, 1/(tokens of the batch), or 1/constant."""
    s, lengths = 0.3, torch.tensor([1, 4, 2, 9])
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.3], dtype=torch.float64)
    push = advantages * (1 - lengths * s)
    expected = {"sequence": (push / lengths).mean(), "token": push.sum() / lengths.sum(), "constant": (push / 6).mean()}
    for how, wanted in expected.items():
        stop = torch.tensor(logit(s), dtype=torch.float64, requires_grad=True)
        log_probs, mask = answer_log_probs(lengths, stop.expand(4))
        (gradient,) = torch.autograd.grad(aggregate(log_probs * advantages[:, None], mask, how, 6), stop)
        assert_close(gradient, wanted)


def drift(how):
    """Change of the logits of wrong and right answers, by one step on very many groups, in units of the learning rate."""
    before, after = train_lengths(how, groups=20_000, steps=1, learning_rate=1.0)
    return [-math.log(b - 1) + math.log(a - 1) for a, b in zip(before.tolist(), after.tolist())]


def mean_size_of_push():
    """Half of E|A| of one completion: the share of the batch that a side has, times its mean advantage (all at G = 8)."""
    total = 0.0
    for k in range(1, 8):
        total += math.comb(8, k) / 2**8 * (k / 8) * math.sqrt((8 - k) / k)
    return total


def test_drift_of_one_step_is_the_exact_sum():
    s = 1 / START_LENGTH
    sequence = s * math.log(1 / s) / (1 - s) - s  # E[1/L] − s of the geometric distribution
    wrong, right = drift("sequence")
    assert wrong == pytest.approx(-sequence * mean_size_of_push(), rel=0.04)
    assert right == pytest.approx(+sequence * mean_size_of_push(), rel=0.04)
    assert drift("constant") == pytest.approx([0, 0], abs=0.004)
    assert drift("token") == pytest.approx([0, 0], abs=0.004)  # Its bias is of the order 1 / completions.


def test_600_steps_do_what_the_notebook_says():
    ends = {how: torch.stack([train_lengths(how, seed=seed)[-1] for seed in (3, 4)]).mean(dim=0) for how in HOWS}
    assert ends["sequence"][0] > 40 and ends["sequence"][1] < 1.3
    assert 5.5 < ends["token"][0] < 9 and 3.2 < ends["token"][1] < 4.8
    assert all(4 < end < 6.3 for end in ends["constant"])


def test_larger_batch_tames_the_token_mean():
    few, many = (train_lengths("token", groups=groups, steps=300)[-1] for groups in (1, 16))
    assert few[0] > many[0] + 0.5
    assert many.tolist() == pytest.approx([5, 5], abs=0.4)


def test_history_begins_at_the_start_and_a_seed_gives_a_run():
    run = train_lengths("token", steps=5, seed=1)
    assert run.shape == (6, 2)
    assert_close(run[0], torch.tensor([5.0, 5.0]))
    assert torch.equal(run, train_lengths("token", steps=5, seed=1))
    assert not torch.equal(run, train_lengths("token", steps=5, seed=2))
    assert not run.requires_grad


def test_unknown_average_is_refused():
    with pytest.raises(ValueError, match="aggregation"):
        train_lengths("mean", steps=1)


def test_mean_length_is_one_over_the_stop_probability():
    for s in (0.001, 0.2, 0.99):
        assert mean_length(torch.tensor(logit(s), dtype=torch.float64)).item() == pytest.approx(1 / s)
