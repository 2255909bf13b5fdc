"""Estimators of the KL divergence from one sampled token: k1, k2, k3.

KL(policy ‖ reference) is the mean of log policy − log reference over the policy's own samples. An estimate from single
tokens is what the leash of GRPO is made of. What each does as a *loss* is another question than what it does as a
number: notebook 04 takes it up.
"""

import torch
from torch import Tensor

FAR = 20.0  # From here on, exp continues as a straight line. exp(20) is half a billion: far outside of any healthy run.


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str = "k3") -> Tensor:
    """Estimate KL(policy ‖ reference) from tokens that the policy sampled.

    With d = ref_log_prob − log_prob:

    k1 = −d              unbiased, often negative
    k2 = d² / 2          biased, never negative
    k3 = exp(d) − d − 1  unbiased, never negative: k1 plus a term whose mean is zero

    Args:
        log_probs: (N, T) of the policy.
        ref_log_probs: (N, T) of the reference, for the same tokens.
        kind: "k1", "k2" or "k3".

    Returns:
        (N, T), in nats. k3 is finite for each finite input, with a gradient that still pulls back.

    Raises:
        ValueError: an unknown `kind`.

    Source: Schulman 2020, "Approximating KL divergence"; k3 in GRPO: Shao et al. 2024, equation 4.

    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]))
    tensor([0.3679])
    """
    d = ref_log_probs - log_probs
    d = d.to(torch.promote_types(d.dtype, torch.float32))  # exp(FAR) does not fit into 16 bits.
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return expm1_linear_far(d) - d
    raise ValueError(f'kl must be "k1", "k2" or "k3", got {kind!r}')


def expm1_linear_far(x: Tensor) -> Tensor:
    """exp(x) − 1 up to x = FAR, then its tangent there: no overflow, and the slope never drops to zero.

    A clamp would be finite too, but its slope beyond the limit is zero: a leash that lets go when it is needed most.
    `expm1` keeps the digits that exp(x) − 1 loses for small x.

    >>> expm1_linear_far(torch.tensor([0.0, 1e-6, 200.0]))
    tensor([0.0000e+00, 1.0000e-06, 8.7815e+10])
    """
    near = torch.expm1(x.clamp(max=FAR))
    return near + (near.detach() + 1) * torch.relu(x - FAR)
