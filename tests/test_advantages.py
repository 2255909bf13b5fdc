"""Advantages: each completion against its own group, flat groups exactly zero, and the two standard deviations apart."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch.testing import assert_close

from grpo_core import flat_group_probability, flat_groups, group_advantages, leave_one_out_advantages

shapes = array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=9)
eighths = arrays(float, shapes, elements=st.integers(-800, 800).map(lambda i: i / 8)).map(torch.from_numpy)
anything = st.floats(allow_nan=False, allow_infinity=False, width=32)


def right(count, group_size):
    return [1.0] * count + [0.0] * (group_size - count)


@pytest.mark.parametrize(
    "rewards, population, sample, centered, leave_one_out",
    [
        (right(1, 2), [0.9998, -0.9998], [0.70701, -0.70701], [0.5, -0.5], [1, -1]),
        (right(1, 4), [1.73165, *[-0.57722] * 3], [1.4997, *[-0.4999] * 3], [0.75, *[-0.25] * 3], [1, *[-1 / 3] * 3]),
        (
            right(3, 8),
            [1.29073] * 3 + [-0.77444] * 5,
            [1.20738] * 3 + [-0.72443] * 5,
            [0.625] * 3 + [-0.375] * 5,
            [0.714286] * 3 + [-0.428571] * 5,
        ),
    ],
)
def test_known_values_of_each_baseline_and_scale(rewards, population, sample, centered, leave_one_out):
    rewards = torch.tensor([rewards], dtype=torch.float64)
    found = torch.cat([
        group_advantages(rewards),
        group_advantages(rewards, correction=1),
        group_advantages(rewards, scale="none"),
        leave_one_out_advantages(rewards),
    ])  # fmt: skip
    expected = torch.tensor([population, sample, centered, leave_one_out], dtype=torch.float64)
    assert_close(found, expected, atol=6e-6, rtol=0)


@pytest.mark.parametrize("correction, expected", [(0, (-0.577, 1.732)), (1, (-0.540, 1.620))])
def test_worked_group(correction, expected):
    rewards = torch.tensor([[0, 1, 0, 0, 0, 1, 0, 0]])
    advantages = group_advantages(rewards, correction=correction)[0]
    assert_close(advantages, torch.tensor(expected)[rewards[0]], atol=5e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("correction", [0, 1])
def test_advantages_agree_with_numpy_for_every_type_of_reward(dtype, correction):
    rewards = (3 * torch.randn(50, 6, generator=torch.Generator().manual_seed(0))).to(dtype)
    x = rewards.numpy().astype(float)
    expected = (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True, ddof=correction) + 1e-4)
    advantages = group_advantages(rewards, correction=correction)
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)


def test_each_group_has_its_own_mean_and_std():
    rewards = torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 1]])
    expected = torch.tensor([[0.57722] * 3 + [-1.73165], [-0.57722] * 3 + [1.73165]])
    assert_close(group_advantages(rewards), expected, atol=1e-5, rtol=0)
    assert torch.equal(group_advantages(rewards)[1:], group_advantages(rewards[1:]))


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, -1e-30, 3e38])
@pytest.mark.parametrize("std_eps", [1e-4, 1e-9, 0.0])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_flat_group_is_exactly_zero_and_counted(value, std_eps, scale):
    flat, mixed = torch.tensor([[value] * 8]), torch.tensor([right(3, 8)])
    for rewards in (flat, torch.cat([flat, mixed])):  # torch.std of eight times 0.7 is 6e-8 in one row, and 0 in two.
        assert (group_advantages(rewards, scale, std_eps)[0] == 0).all()
        assert flat_groups(rewards).tolist() == [True, False][: len(rewards)]
    assert (group_advantages(rewards, scale, std_eps)[1] != 0).all()


@given(st.lists(anything, min_size=1, max_size=4), st.integers(2, 17), st.sampled_from([0, 1]))
def test_any_flat_group_is_exactly_zero(values, group_size, correction):
    rewards = torch.tensor(values)[:, None].expand(-1, group_size)
    assert (group_advantages(rewards, std_eps=0.0, correction=correction) == 0).all()
    assert (leave_one_out_advantages(rewards) == 0).all()


@given(eighths, st.sampled_from(["std", "none"]), st.sampled_from([0, 1]))
def test_advantages_of_a_group_sum_to_zero_and_keep_its_order(rewards, scale, correction):
    advantages = group_advantages(rewards, scale, correction=correction)
    assert_close(advantages.sum(1), torch.zeros(len(rewards)).double(), atol=1e-9, rtol=0)
    assert (advantages.argsort(stable=True) == rewards.argsort(stable=True)).all()


@given(eighths, st.integers(-1000, 1000))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    assert_close(group_advantages(rewards + shift), group_advantages(rewards), atol=1e-9, rtol=0)


@given(eighths, st.floats(0.5, 1000))
def test_the_scale_of_the_rewards_cancels_but_for_std_eps(rewards, factor):
    assert_close(group_advantages(factor * rewards, std_eps=0.0), group_advantages(rewards, std_eps=0.0), atol=1e-9, rtol=0)
    assert_close(group_advantages(-rewards), -group_advantages(rewards), atol=1e-9, rtol=0)
    assert_close(group_advantages(factor * rewards, std_eps=factor * 1e-4), group_advantages(rewards), atol=1e-9, rtol=0)


@given(eighths, st.randoms(use_true_random=False))
def test_order_of_groups_and_of_completions_does_not_matter(rewards, rng):
    groups, rows = (torch.tensor(rng.sample(range(n), n)) for n in rewards.shape)
    shuffled = group_advantages(rewards[groups][:, rows])
    assert_close(shuffled, group_advantages(rewards)[groups][:, rows], atol=1e-9, rtol=0)


@given(eighths)
def test_leave_one_out_is_the_difference_to_the_mean_of_the_others(rewards):
    x = rewards.numpy()
    expected = [[row[i] - np.delete(row, i).mean() for i in range(len(row))] for row in x]
    np.testing.assert_allclose(leave_one_out_advantages(rewards), expected, atol=1e-9)


@pytest.mark.parametrize("group_size, expected", [(2, 0.7024), (4, 0.4490), (8, 0.2007), (16, 0.0403)])
def test_share_of_dead_groups(group_size, expected):
    p = 0.1819
    assert flat_group_probability(p, group_size) == pytest.approx(expected, abs=5e-5)
    groups = torch.tensor(list(product([0, 1], repeat=group_size)))
    weights = torch.where(groups == 1, p, 1 - p).double().prod(1)
    assert weights[flat_groups(groups)].sum().item() == pytest.approx(flat_group_probability(p, group_size))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_groups_of_a_certain_policy_are_all_dead(p):
    assert flat_group_probability(p, 8) == 1
    assert flat_group_probability(torch.tensor([p, 0.5]), 2).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    "rewards, arguments, message",
    [
        (torch.tensor([[1.0]]), {}, "group_size is 1"),
        (torch.ones(3, 0), {}, "group_size is 0"),
        (torch.ones(3), {}, "shape"),
        (torch.ones(1, 2, 3), {}, "shape"),
        (torch.tensor([[1.0, float("nan")]]), {}, "finite"),
        (torch.tensor([[1.0, float("inf")]]), {}, "finite"),
        (torch.ones(1, 2), {"scale": "batch"}, "scale"),
        (torch.ones(1, 2), {"correction": 2}, "correction"),
        (torch.ones(1, 2), {"std_eps": -1e-9}, "std_eps"),
        (torch.ones(1, 2), {"std_eps": float("nan")}, "std_eps"),
    ],
)
def test_bad_rewards_and_settings_are_named(rewards, arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **arguments)
