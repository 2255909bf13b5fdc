"""GAE: against the sums that define it, at both ends of lambda, and deaf to whatever stands behind the mask."""

import pytest
import torch
from torch.testing import assert_close

from grpo_core.rivals.gae import gae, whiten

INF, NAN = float("inf"), float("nan")


def batch(seed=0, rows=6, length=5):
    """Rewards, values and mask (rows, length) with each completion length from 1 to `length`."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, length, generator=generator, dtype=torch.float64)
    lengths = torch.arange(rows) % length + 1
    return rewards, values, torch.arange(length) < lengths.unsqueeze(1)


def real_rows(rewards, values, mask):
    """Each row as two lists that are as long as its completion: no mask, no padding."""
    for row in range(len(mask)):
        length = int(mask[row].sum())
        yield rewards[row, :length].tolist(), values[row, :length].tolist()


def padded(rows, length):
    return torch.tensor([row + [0.0] * (length - len(row)) for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("filling", [0.0, 9.0, INF, -INF, NAN])
def test_known_values_whatever_stands_behind_the_end(filling):
    rewards = torch.tensor([[0, 0, 1, filling]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.6, 0.7, filling if filling else 9.0]], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 1, 0]]), gamma=1.0, gae_lambda=0.95)
    assert_close(advantages, torch.tensor([[0.46575, 0.385, 0.3, 0.0]], dtype=torch.float64))
    assert_close(returns, torch.tensor([[0.96575, 0.985, 1.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_advantage_is_the_double_sum_of_the_definition(gamma, gae_lambda):
    rewards, values, mask = batch()
    expected = []
    for r, v in real_rows(rewards, values, mask):
        after = v[1:] + [0.0]
        steps = range(len(r))
        expected.append([
            sum((gamma * gae_lambda) ** (k - t) * (r[k] + gamma * after[k] - v[k]) for k in steps if k >= t) for t in steps
        ])  # fmt: skip
    advantages, returns = gae(rewards, values, mask, gamma, gae_lambda)
    assert_close(advantages, padded(expected, 5))
    assert_close(returns[mask], (advantages + values)[mask])
    assert (returns[~mask] == 0).all()


def test_lambda_0_is_the_error_of_one_step():
    rewards, values, mask = batch(1)
    expected = [[r[t] + 0.9 * (v + [0.0])[t + 1] - v[t] for t in range(len(r))] for r, v in real_rows(rewards, values, mask)]
    assert_close(gae(rewards, values, mask, 0.9, 0.0)[0], padded(expected, 5))


def test_lambda_1_is_the_reward_to_go_less_the_value_and_its_return_ignores_the_critic():
    rewards, values, mask = batch(2)
    expected = padded([[sum(r[t:]) for t in range(len(r))] for r, _ in real_rows(rewards, values, mask)], 5)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    assert_close(returns, expected)
    assert_close(advantages[mask], (expected - values)[mask])


def test_a_perfect_critic_leaves_no_advantage():
    """Where the value is the reward to go, nothing is better than expected, for any lambda."""
    rewards, _, mask = batch(3)
    values = padded([[sum(r[t:]) for t in range(len(r))] for r, _ in real_rows(rewards, rewards, mask)], 5)
    assert_close(gae(rewards, values, mask, 1.0, 0.6)[0], torch.zeros_like(values))


def test_rows_do_not_see_each_other():
    rewards, values, mask = batch(4)
    together = gae(rewards, values, mask)
    for row in range(len(mask)):
        alone = gae(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1])
        assert_close([x[row : row + 1] for x in together], list(alone))


def test_values_are_not_differentiated():
    rewards, values, mask = batch()
    assert not any(x.requires_grad for x in gae(rewards, values.requires_grad_(), mask))


def test_an_empty_row_is_zero():
    for found in gae(torch.tensor([[NAN, 1.0]]), torch.tensor([[INF, 2.0]]), torch.tensor([[0, 0]])):
        assert found.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("rewards", "mask", "message"),
    [(torch.zeros(2), torch.ones(2, 3), "same shape"), (torch.zeros(2, 3), torch.tensor([[1, 0, 1]] * 2), "gap")],
)
def test_what_does_not_fit_is_refused(rewards, mask, message):
    with pytest.raises(ValueError, match=message):
        gae(rewards, torch.zeros(2, 3), mask)


def test_whitened_advantages_have_mean_0_and_std_1_over_the_real_tokens_of_the_batch():
    advantages, _, mask = batch(5)
    advantages = 40 + 0.01 * advantages
    white = whiten(torch.where(mask, advantages, NAN), mask)
    real = white[mask]
    assert_close(real.mean(), torch.tensor(0.0, dtype=torch.float64), atol=1e-10, rtol=0)
    assert_close(real.square().mean(), torch.tensor(1.0, dtype=torch.float64), atol=1e-5, rtol=0)
    assert (white[~mask] == 0).all()
    assert (real.argsort() == advantages[mask].argsort()).all()
    assert not torch.allclose(white[0][mask[0]].mean(), torch.tensor(0.0, dtype=torch.float64), atol=0.1)


@pytest.mark.parametrize("level", [0.0, 0.1, 0.7, -3.0, 1e30])
@pytest.mark.parametrize("mask", [torch.ones(8, 3), torch.tensor([[1, 0, 0]]), torch.zeros(2, 3)])
def test_equal_advantages_become_exactly_zero(level, mask):
    assert (whiten(torch.full(mask.shape, level), mask) == 0).all()
