"""The clipped surrogate of PPO: trust samples of an older policy, but not too far.

Each function works on single tokens; how they are averaged is decided in grpo.py. Left out: dual clip, and ratios of
whole sequences.
"""

import torch
from torch import Tensor

from grpo_core.kl import FAR


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """How much more likely each token is now than when it was sampled: exp(log_prob − old_log_prob).

    Exactly 1 where the two are equal. It continues as a straight line where exp would overflow (beyond e^20).

    >>> ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]))
    tensor([1.0000, 2.7183])
    """
    log_ratio = log_probs - old_log_probs
    near = log_ratio.clamp(max=FAR).exp()
    return near + near.detach() * torch.relu(log_ratio - FAR)


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
) -> Tensor:
    """The objective for each token, to be maximized.

    min(ratio · A, clip(ratio, 1 − clip_eps, 1 + clip_eps_high) · A)

    It is the minimum for both signs of A: the objective stops rewarding a move that already went far enough, and never
    stops punishing one that went too far the wrong way.

    Args:
        log_probs: (N, T), differentiable.
        old_log_probs: (N, T), of the policy that sampled.
        advantages: (N,), one for each completion; all its tokens share it.
        clip_eps: how far below 1 the ratio is trusted, and above too if `clip_eps_high` is None.
        clip_eps_high: how far above 1 (DAPO's clip-higher).

    Returns:
        (N, T)

    Raises:
        ValueError: shapes that do not fit, `clip_eps` outside (0, 1), `clip_eps_high` <= 0.

    Source: Schulman et al. 2017, PPO, equation 7; clip-higher: Yu et al. 2025, DAPO.

    >>> log_ratio = torch.tensor([[0.5], [1.5], [0.5], [1.5]]).log()
    >>> clipped_surrogate(log_ratio, torch.zeros(4, 1), torch.tensor([1.0, 1.0, -1.0, -1.0])).flatten()
    tensor([ 0.5000,  1.2000, -0.8000, -1.5000])
    """
    low, high = clip_range(clip_eps, clip_eps_high)
    per_row = _per_row(advantages, log_probs)
    r = ratio(log_probs, old_log_probs)
    return torch.minimum(r * per_row, r.clamp(low, high) * per_row)


def clip_binds(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
) -> Tensor:
    """(N, T) bool: tokens that the clip has silenced, whose objective no longer has a gradient.

    Above the band that takes a positive advantage, below it a negative one. Arguments as in `clipped_surrogate`.
    """
    low, high = clip_range(clip_eps, clip_eps_high)
    per_row = _per_row(advantages, log_probs)
    r = ratio(log_probs, old_log_probs)
    return ((r > high) & (per_row > 0)) | ((r < low) & (per_row < 0))


def clip_fraction(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
) -> float:
    """Share of the completion tokens on which the clip binds. (Some logs count every ratio outside the band instead.)

    >>> log_ratio = torch.tensor([[1.5], [1.5], [1.5], [0.9]]).log()
    >>> clip_fraction(log_ratio, torch.zeros(4, 1), torch.tensor([1.0, 1.0, -1.0, 1.0]), torch.ones(4, 1))
    0.5
    """
    mask = completion_mask.bool()
    binds = clip_binds(log_probs, old_log_probs, advantages, clip_eps, clip_eps_high)
    return ((binds & mask).sum() / mask.sum().clamp(min=1)).item()


def clip_range(clip_eps: float, clip_eps_high: float | None = None) -> tuple[float, float]:
    """The band of trusted ratios, after a check of its two settings."""
    if not 0 < clip_eps < 1:
        raise ValueError(f"clip_eps must lie between 0 and 1, got {clip_eps}: the ratio is kept above 1 − clip_eps")
    if clip_eps_high is not None and not clip_eps_high > 0:
        raise ValueError(f"clip_eps_high must be positive, got {clip_eps_high}: the ratio is kept below 1 + clip_eps_high")
    return 1 - clip_eps, 1 + (clip_eps if clip_eps_high is None else clip_eps_high)


def _per_row(advantages: Tensor, per_token: Tensor) -> Tensor:
    """(N, 1). Without it, (N,) against (N, T) would run along the tokens wherever N equals T."""
    if advantages.shape != per_token.shape[:1]:
        raise ValueError(
            f"advantages must have the shape ({per_token.shape[0]},), one for each completion, got {tuple(advantages.shape)}: "
            "flatten (prompts, group_size)"
        )
    return advantages.unsqueeze(1)
