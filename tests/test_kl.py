"""KL estimators: exact in the mean, in value and in gradient, and a leash that holds at any distance."""

import math
from decimal import Decimal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_core import kl_estimate
from grpo_core.kl import FAR, expm1_linear_far

PI = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REF = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def leash(d, kind="k3", dtype=torch.float32):
    """Value, and slope by the policy's log-prob, where the reference is d nats above the policy."""
    log_prob = torch.zeros(1, dtype=dtype, requires_grad=True)
    value = kl_estimate(log_prob, torch.tensor([d], dtype=dtype), kind)
    value.backward()
    return value.item(), log_prob.grad.item()


@pytest.mark.parametrize("kind, expected", [("k1", 0.498224), ("k2", 0.491599), ("k3", 0.498224)])
def test_expected_value_on_three_tokens(kind, expected):
    mean = (PI * kl_estimate(PI.log(), REF.log(), kind)).sum().item()
    assert mean == pytest.approx(expected, abs=1e-6)
    assert (mean == pytest.approx((PI * (PI / REF).log()).sum().item())) == (kind != "k2")


@pytest.mark.parametrize("kind, expected", [("k1", [0, 0, 0]), ("k2", [0.36023, -0.14947, -0.21077]), ("k3", [0.4, 0, -0.4])])
def test_expected_gradient_as_a_loss_on_three_tokens(kind, expected):
    logits = PI.log().requires_grad_()
    (PI * kl_estimate(logits.log_softmax(0), REF.log(), kind)).sum().backward()
    assert_close(logits.grad, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind, forward", [("k2", True), ("k3", False)])
def test_gradient_of_k2_and_k3_is_that_of_one_of_the_two_divergences(kind, forward):
    exact, sampled = (torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    ref = torch.tensor([1.0, 0.2, -0.7, 0.1], dtype=torch.float64).log_softmax(0)
    p, q = (exact.log_softmax(0), ref) if forward else (ref, exact.log_softmax(0))
    (p.exp() * (p - q)).sum().backward()
    log_probs = sampled.log_softmax(0)
    (log_probs.detach().exp() * kl_estimate(log_probs, ref, kind)).sum().backward()
    assert_close(sampled.grad, exact.grad)


@pytest.mark.parametrize(
    "mu, kind, bias, spread",
    [
        (0.1, "k1", 0, 20.0),
        (0.1, "k2", 0.0025, 1.418),
        (0.1, "k3", 0, 1.417),
        (1.0, "k1", 0, 2.0),
        (1.0, "k2", 0.25, 1.732),
        (1.0, "k3", 0, 1.695),
        (2.0, "k1", 0, 1.0),
        (2.0, "k2", 1.0, 2.449),
        (2.0, "k3", 0, 3.521),
    ],
)
def test_bias_and_spread_on_two_gaussians(mu, kind, bias, spread):
    x, kl = torch.linspace(-12, 12, 24001, dtype=torch.float64), mu**2 / 2
    weight = (-x.square() / 2).exp() / math.sqrt(2 * math.pi) * 0.001
    k = kl_estimate(-x.square() / 2, -(x - mu).square() / 2, kind)
    mean = (weight * k).sum()
    assert (mean.item() / kl - 1) == pytest.approx(bias, abs=1e-6)
    assert ((weight * (k - mean).square()).sum().sqrt() / kl).item() == pytest.approx(spread, abs=1e-3)


@pytest.mark.parametrize("d", [10.0, 20.0, 20.5, 88.0, 89.0, 200.0, 1e4])
def test_k3_far_below_the_reference_is_finite_and_pulls_up(d):
    value, slope = leash(d)
    assert 0 < value < math.inf and -math.inf < slope < -1
    assert leash(1.1 * d)[0] > value


@pytest.mark.parametrize("d", [-10.0, -88.0, -200.0, -1e4])
def test_k3_far_above_the_reference_is_finite_and_pulls_down(d):
    assert leash(d) == (pytest.approx(-d - 1, rel=1e-4), pytest.approx(1, rel=1e-4))


@pytest.mark.parametrize("d, expected", [(1e-4, 5.0e-9), (-1e-4, 5.0e-9), (1e-6, 5.0e-13), (-1e-6, 5.0e-13)])
def test_k3_close_by_keeps_its_digits(d, expected):
    value, slope = leash(d)
    assert value >= 0
    assert value == pytest.approx(expected, rel=0.1, abs=1e-11)
    assert slope == pytest.approx(-d, rel=0.1)
    assert leash(d, dtype=torch.float64)[0] == pytest.approx(expected, rel=1e-3)


@given(st.floats(-1e4, 1e4, width=32))
def test_k3_is_never_negative_and_always_pulls_back(d):
    value, slope = leash(d)
    assert 0 <= value < math.inf
    assert math.isfinite(slope) and slope * d <= 0
    if abs(d) > 1e-6:
        assert value > 0 or abs(d) < 1e-3
        assert slope * d < 0


@given(st.floats(-50, 20).filter(lambda d: abs(d) > 1e-3))
def test_k3_agrees_with_fifty_digit_arithmetic(d):
    exact = Decimal(d).exp() - Decimal(d) - 1
    assert leash(d, dtype=torch.float64)[0] == pytest.approx(float(exact), rel=1e-7)


@given(st.floats(-1e4, 1e4))
def test_k1_and_k2_are_their_formulas(d):
    assert leash(d, "k1", torch.float64) == (-d, 1)
    assert leash(d, "k2", torch.float64) == (pytest.approx(d * d / 2), -d)


@pytest.mark.parametrize("x", [-5.0, 1.0, FAR - 1e-6, FAR + 1e-6, 30.0])
def test_far_exponential_has_no_jump_and_keeps_its_slope(x):
    x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = expm1_linear_far(x)
    y.backward()
    near = min(x.item(), FAR)
    assert y.item() == pytest.approx(math.exp(near) * (1 + x.item() - near) - 1)
    assert x.grad.item() == pytest.approx(math.exp(near))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_no_distance_costs_nothing(kind):
    value, slope = leash(0.0, kind)
    assert value == 0
    assert slope == (1 if kind == "k1" else 0)


@pytest.mark.parametrize("kind", ["k4", "K3", "", None])
def test_unknown_kind_is_named(kind):
    with pytest.raises(ValueError, match="kl must be"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind)
