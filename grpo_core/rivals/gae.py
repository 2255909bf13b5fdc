"""Generalized advantage estimation: from a critic's values to one advantage for each token.

GRPO gives all tokens of a completion the same advantage. PPO asks a critic, after each token, how much better the outlook has
become. Left out: masks with gaps, such as conversations of several turns have.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    completion_mask: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """How much better each token made things than the critic expected.

    delta_t     = r_t + gamma · V_t+1 − V_t
    advantage_t = delta_t + gamma · lambda · advantage_t+1
    return_t    = advantage_t + V_t

    Nothing follows the last real token: there both V_t+1 and advantage_t+1 are 0.

    Args:
        rewards: (N, T), for each token.
        values: (N, T), V_t is the critic's value of the state *before* token t. Not differentiated.
        completion_mask: (N, T), true from the first token through the last real one. What stands behind is never read.
        gamma: what a reward one token later is worth now.
        gae_lambda: 0 trusts the critic (the one-step error delta); 1 trusts the rewards (their sum, less the value).

    Returns:
        Advantages, and returns, which the critic learns; each (N, T), and 0 outside the mask.

    Raises:
        ValueError: shapes that differ, or a mask with a gap.

    Source: Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16.

    >>> rewards, values = torch.tensor([[0.0, 0, 1, 0]]), torch.tensor([[0.5, 0.6, 0.7, 9]])
    >>> advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 1, 0]]))
    >>> [round(number, 5) for number in torch.cat([advantages, returns]).flatten().tolist()]
    [0.46575, 0.385, 0.3, 0.0, 0.96575, 0.985, 1.0, 0.0]
    """
    mask = completion_mask.bool()
    if not rewards.shape == values.shape == mask.shape:
        shapes = f"{tuple(rewards.shape)}, {tuple(values.shape)}, {tuple(mask.shape)}"
        raise ValueError(f"rewards, values and completion_mask must have the same shape (N, T), got {shapes}")
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("completion_mask has a gap: it must be true from the first token through the last real one")
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values.detach(), 0.0)
    next_values = F.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    following = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        advantages[:, t] = following = deltas[:, t] + gamma * gae_lambda * following
    return advantages, advantages + values


def whiten(advantages: Tensor, completion_mask: Tensor) -> Tensor:
    """Shift and scale (N, T) advantages to mean 0 and standard deviation 1 over the real tokens; 0 elsewhere.

    It takes one mean for the whole batch, where GRPO takes one for each group. If all are equal, the result is 0.

    >>> whiten(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[1, 1, 0]]))
    tensor([[-1.,  1.,  0.]])
    """
    mask = completion_mask.bool()
    real = advantages[mask]
    if len(real) == 0 or real.max() == real.min():  # The mean of equal numbers is not exactly equal to them.
        return torch.zeros_like(advantages)
    return torch.where(mask, (advantages - real.mean()) / (real.std(correction=0) + 1e-8), 0.0)
