"""Advantages: how much better each completion did than its own group. This replaces PPO's critic.

The baseline is the group's mean, not the batch's: a hard prompt is compared with itself. Left out: normalising over the
batch, and rewards per token.
"""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, scale: str = "std", std_eps: float = 1e-4, correction: int = 0) -> Tensor:
    """How much better each completion did than its own group.

    advantage = (reward − group mean) / (group std + std_eps)

    Args:
        rewards: (prompts, group_size), any real numbers.
        scale: "std" divides by the group's standard deviation; "none" only centers (Dr. GRPO).
        std_eps: added to the standard deviation.
        correction: 0 for the population standard deviation, 1 for the sample one (torch's and TRL's default).

    Returns:
        (prompts, group_size). A flat group, whose rewards are all equal, is exactly zero.

    Raises:
        ValueError: fewer than two completions per prompt (there is nothing to compare with), rewards that are not
            finite or not two-dimensional, an unknown `scale`, a `correction` other than 0 and 1, a negative `std_eps`.

    Source: Shao et al. 2024, DeepSeekMath, section 4.1; "none": Liu et al. 2025, Dr. GRPO.

    >>> group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[ 1.7317, -0.5772, -0.5772, -0.5772]])
    """
    rewards = _check_rewards(rewards)
    if scale not in ("std", "none"):
        raise ValueError(f'scale must be "std" or "none", got {scale!r}')
    if correction not in (0, 1):
        raise ValueError(f"correction must be 0 (population) or 1 (sample standard deviation), got {correction!r}")
    if not std_eps >= 0:
        raise ValueError(f"std_eps must not be negative, got {std_eps}")
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    if scale == "std":
        centered = centered / (rewards.std(dim=1, keepdim=True, correction=correction) + std_eps)
    advantages = centered.masked_fill(flat_groups(rewards).unsqueeze(1), 0.0)
    if not torch.isfinite(advantages).all():
        raise ValueError("rewards are too large or too close: their standard deviation cannot be computed")
    return advantages


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """How much better each completion did than the mean of the *others* in its group.

    advantage_i = reward_i − mean of reward_j over j ≠ i = (reward_i − group mean) · G / (G − 1)

    Source: Kool et al. 2019; Ahmadian et al. 2024 (RLOO).

    >>> leave_one_out_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    """
    group_size = _check_rewards(rewards).shape[1]
    return group_advantages(rewards, scale="none") * (group_size / (group_size - 1))


def flat_groups(rewards: Tensor) -> Tensor:
    """(prompts,) bool: groups whose rewards are all equal, and which therefore teach nothing.

    The test is max == min. A standard deviation of 0 will not do: in floating point, the mean of eight times 0.7 is not
    exactly 0.7, and so their standard deviation need not be exactly 0.

    >>> flat_groups(torch.tensor([[0.7] * 8, [1.0, 0.0] * 4]))
    tensor([ True, False])
    """
    return rewards.amax(dim=1) == rewards.amin(dim=1)


def flat_group_probability(success: float | Tensor, group_size: int) -> float | Tensor:
    """Chance that all completions of a group are right, or all wrong: p^G + (1 − p)^G.

    Args:
        success: p, the chance that one completion is right, independently of the others.
        group_size: G.

    >>> round(flat_group_probability(0.1819, 8), 4)
    0.2007
    """
    return success**group_size + (1 - success) ** group_size


def _check_rewards(rewards: Tensor) -> Tensor:
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have the shape (prompts, group_size), got {tuple(rewards.shape)}")
    if rewards.shape[1] < 2:
        raise ValueError(
            f"group_size is {rewards.shape[1]}, but it must be at least 2: one completion has no group to compare with"
        )
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite numbers: look for nan or inf in what the verifier returns")
    return rewards
