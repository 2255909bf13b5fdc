"""The clipped surrogate: values and slopes for both signs, near and far, token by token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_core import clip_fraction, clipped_surrogate, ratio
from grpo_core.surrogate import clip_binds, clip_range

signs = st.sampled_from([-1.0, 1.0])
log_ratios = st.floats(-6, 6).filter(lambda x: min(abs(math.exp(x) - 0.8), abs(math.exp(x) - 1.2)) > 1e-6)


def value_and_slope(log_ratio, advantage, **clip):
    """Of the objective in one token, and its derivative by the log-ratio."""
    x = torch.tensor([[log_ratio]], dtype=torch.float32, requires_grad=True)
    value = clipped_surrogate(x, torch.zeros(1, 1), torch.tensor([advantage]), **clip)
    value.backward()
    return value.item(), x.grad.item()


@pytest.mark.parametrize(
    "advantage, r, objective, slope",
    [
        (+1.0, 0.5, 0.5, 1),
        (+1.0, 0.9, 0.9, 1),
        (+1.0, 1.1, 1.1, 1),
        (+1.0, 1.5, 1.2, 0),
        (+1.0, 10.0, 1.2, 0),
        (-1.0, 0.1, -0.8, 0),
        (-1.0, 0.5, -0.8, 0),
        (-1.0, 0.9, -0.9, -1),
        (-1.0, 1.1, -1.1, -1),
        (-1.0, 1.5, -1.5, -1),
        (-1.0, 10.0, -10.0, -1),
        (0.0, 1.5, 0.0, 0),
        (-2.0, 1.5, -3.0, -2),
    ],
)
def test_objective_and_slope_for_both_signs(advantage, r, objective, slope):
    value, by_log_ratio = value_and_slope(math.log(r), advantage)
    assert value == pytest.approx(objective, abs=1e-5)
    assert by_log_ratio / r == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("high, reaches", [(None, 0.012), (0.28, 0.0128)])
def test_clip_higher_lets_a_rare_token_rise_further(high, reaches):
    for p, pushed in [(reaches - 1e-5, True), (reaches + 1e-5, False)]:
        _, slope = value_and_slope(math.log(p / 0.01), 1.0, clip_eps_high=high)
        assert (slope > 0) == pushed
    assert value_and_slope(math.log(0.5), -1.0, clip_eps_high=high) == (pytest.approx(-0.8), 0)


def test_each_advantage_goes_with_its_row_where_rows_and_tokens_are_equally_many():
    log_probs = torch.arange(9.0).view(3, 3).log()
    values = clipped_surrogate(log_probs, torch.zeros(3, 3), torch.tensor([1.0, 0.0, -1.0]), clip_eps_high=10.0)
    assert_close(values, torch.tensor([[0.0, 1, 2], [0, 0, 0], [-6, -7, -8]]))
    binds = clip_binds(log_probs, torch.zeros(3, 3), torch.tensor([1.0, 0.0, -1.0]), clip_eps_high=1.5)
    assert not binds.any()


@pytest.mark.parametrize("shape", [(), (3, 1), (3, 3), (1, 3), (4,)])
@pytest.mark.parametrize("function", [clipped_surrogate, clip_binds])
def test_advantages_of_another_shape_are_refused(function, shape):
    with pytest.raises(ValueError, match=r"advantages must have the shape \(3,\)"):
        function(torch.zeros(3, 3), torch.zeros(3, 3), torch.ones(shape))


def test_first_step_has_ratio_one_and_the_slope_of_reinforce():
    log_probs = (10 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0])
    assert (ratio(log_probs, log_probs.detach()) == 1).all()
    assert clip_fraction(log_probs, log_probs.detach(), advantages, torch.ones(5, 4)) == 0.0
    clipped_surrogate(log_probs, log_probs.detach(), advantages).sum().backward()
    assert torch.equal(log_probs.grad, advantages[:, None].expand(5, 4))


@pytest.mark.parametrize("log_ratio", [89.0, 200.0, 1e4])
def test_runaway_ratio_stays_finite_and_is_still_pushed_back(log_ratio):
    value, slope = value_and_slope(log_ratio, -1.0)
    assert -math.inf < value < -math.exp(20) and -math.inf < slope < -1
    assert value_and_slope(log_ratio, 1.0) == (pytest.approx(1.2), 0)


@pytest.mark.parametrize("log_ratio", [-89.0, -200.0, -1e4])
def test_vanished_ratio_stays_finite(log_ratio):
    assert value_and_slope(log_ratio, 1.0) == (pytest.approx(0, abs=1e-30), pytest.approx(0, abs=1e-30))
    assert value_and_slope(log_ratio, -1.0) == (pytest.approx(-0.8), 0)


@given(log_ratios, signs, st.floats(0.1, 5))
def test_clipping_never_raises_the_objective_and_silences_exactly_where_it_binds(log_ratio, sign, size):
    x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    zero, advantage = torch.zeros_like(x).detach(), torch.tensor([sign * size], dtype=torch.float64)
    clipped, plain = clipped_surrogate(x, zero, advantage), sign * size * math.exp(log_ratio)
    clipped.backward()
    binds = clip_binds(x, zero, advantage).item()
    assert clipped.item() <= plain + 1e-9
    assert binds == (math.exp(log_ratio) > 1.2 if sign > 0 else math.exp(log_ratio) < 0.8)
    assert binds == (x.grad.item() == 0)
    if not binds:
        assert clipped.item() == pytest.approx(plain) and x.grad.item() == pytest.approx(plain)


@given(st.floats(-20, 20))
def test_ratio_is_the_quotient_of_the_probabilities(log_ratio):
    x = torch.tensor(log_ratio, dtype=torch.float64)
    assert ratio(x, torch.zeros_like(x)).item() == pytest.approx(math.exp(log_ratio), rel=1e-7)
    assert ratio(torch.zeros_like(x), x).item() == pytest.approx(math.exp(-log_ratio), rel=1e-7)


@pytest.mark.parametrize(
    "mask, expected",
    [([1, 1, 1, 1], 0.5), ([1, 0, 1, 1], 1 / 3), ([0, 0, 1, 1], 0), ([1, 1, 0, 0], 1), ([0, 0, 0, 0], 0)],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float])
def test_clip_fraction_counts_only_where_the_clip_binds_inside_the_mask(mask, expected, dtype):
    log_probs, mask = torch.tensor([[1.5], [1.5], [1.5], [0.9]]).log(), torch.tensor(mask, dtype=dtype)[:, None]
    fraction = clip_fraction(log_probs, torch.zeros(4, 1), torch.tensor([1.0, 1.0, -1.0, 1.0]), mask)
    assert fraction == pytest.approx(expected)


@pytest.mark.parametrize("advantage, expected", [(1.0, 1 / 3), (-1.0, 2 / 3), (0.0, 0)])
def test_clip_fraction_depends_on_the_sign(advantage, expected):
    log_probs = torch.tensor([[0.5, 0.6, 1.5]]).log()
    fraction = clip_fraction(log_probs, torch.zeros(1, 3), torch.tensor([advantage]), torch.ones(1, 3))
    assert fraction == pytest.approx(expected)


@pytest.mark.parametrize(
    "arguments, message",
    [((e,), "clip_eps must") for e in (0.0, 1.0, -0.2, 1.5, math.nan)]
    + [((0.2, e), "clip_eps_high must") for e in (0.0, -0.1, math.nan)],
)
def test_bad_clip_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        clip_range(*arguments)


def test_clip_band():
    assert clip_range(0.2) == (0.8, 1.2)
    assert clip_range(0.2, 3.0) == (0.8, 4.0)
