"""Exercises of notebook 04: k3 at any distance, the exact KL, a leash for stale samples.

A leash is judged by its values *and* by its gradient, which is what training feels. So these checks run the reader's
function, differentiate what it returns, and compare both.
"""

import torch
from torch import Tensor

from grpo_core.kl import FAR, kl_estimate
from grpo_core.lab.checks import Exercise, Mistake, Probed, slope
from grpo_core.surrogate import ratio


def value_and_slope(function, d: Tensor):
    """(2, len(d)): the value and the slope by the policy's log-prob, in units in which both are near 1 for small d."""
    log_probs = torch.full_like(d, -1.0, requires_grad=True)
    value = function(log_probs, log_probs.detach() + d)
    if not isinstance(value, Tensor):
        return value
    return torch.stack([2 * value.detach() / d.square(), -slope(value, log_probs) / d])


def leash_gradient(function, logits: Tensor, old_logits: Tensor, ref_logits: Tensor):
    """The gradient by the logits, in the mean over samples of the old policy: an exact sum over all tokens."""
    logits = logits.clone().requires_grad_()
    log_probs, old, ref = logits.log_softmax(-1), old_logits.log_softmax(-1), ref_logits.log_softmax(-1)
    value = function(log_probs, old, ref)
    if isinstance(value, Tensor) and value.shape != log_probs.shape:
        raise ValueError("return one number for each token; the mean is taken for you")
    return slope((old.exp() * value).sum(), logits) if isinstance(value, Tensor) else value


def _far(d, near):
    """Continue `near` along the tangent of the exponential beyond FAR."""
    return near(d.clamp(max=FAR)) + torch.exp(torch.tensor(FAR)) * torch.relu(d - FAR)


NEAR, DISTANT = torch.tensor([0.5, -0.5, 2.0, -3.0, 1e-2, -1e-2]), torch.tensor([25.0, 100.0, 500.0, -25.0, -100.0])

check_k3 = Probed(
    probe=value_and_slope,
    right=kl_estimate,
    inputs=[(NEAR,), (torch.tensor([3e-3, -3e-3, 5e-3]),), (DISTANT,)],
    mistakes=[
        Mistake(
            lambda p, ref: torch.exp(ref - p) - (ref - p) - 1,
            "the formula is right, the arithmetic is not: exp(d) − 1 loses its digits at small d (use expm1), and from "
            "d = 89 on it is inf (continue along the tangent from 20 on).",
        ),
        Mistake(
            lambda p, ref: torch.expm1(ref - p) - (ref - p),
            "small d is right, but from d = 89 on expm1 is inf. Continue along the tangent from 20 on.",
        ),
        Mistake(
            lambda p, ref: _far(ref - p, lambda d: torch.exp(d) - 1) - (ref - p),
            "large d is right, but at small d you lose digits: exp(d) − 1 rounds to steps of 1e-7. torch.expm1 does not.",
        ),
        Mistake(
            lambda p, ref: torch.expm1((ref - p).clamp(max=FAR)) - (ref - p).clamp(max=FAR),
            "you clamped d. The value is finite, but its gradient beyond 20 is 0: the leash lets go where it is needed most.",
        ),
        Mistake(
            lambda p, ref: torch.expm1((ref - p).clamp(-FAR, FAR)) - (ref - p).clamp(-FAR, FAR),
            "you clamped d on both sides. Beyond the limits the gradient is 0: the leash lets go where it is needed most.",
        ),
        Mistake(
            lambda p, ref: torch.expm1((ref - p).clamp(max=FAR)) - (ref - p),
            "you clamped inside the exponential only. Beyond 20 the slope of what is left, −d, has the wrong sign: it pushes "
            "the policy further away.",
        ),
        Mistake(
            lambda p, ref: kl_estimate(ref, p),
            "the direction is flipped: d = ref_log_probs − log_probs, not the other way round. For close policies nobody "
            "would notice.",
        ),
        Mistake(lambda p, ref: -kl_estimate(p, ref), "the sign is turned around: k3 is never negative."),
        Mistake(lambda p, ref: kl_estimate(p, ref) + 1, "the − 1 is missing: k3 of two equal policies is 0."),
        Mistake(
            lambda p, ref: kl_estimate(p, ref) + (ref - p),
            "this is ratio − 1, whose mean is 0. Subtract d as well.",
        ),
        Mistake(
            lambda p, ref: kl_estimate(p.detach(), ref),
            "the values are right, but no gradient reaches log_probs: leave out detach, no_grad and item.",
        ),
        Mistake(lambda p, ref: kl_estimate(p, ref, "k1"), "this is k1."),
        Mistake(lambda p, ref: kl_estimate(p, ref, "k2"), "this is k2."),
    ],
    otherwise="for some d the value, or its slope by log_probs, is not that of k3. Try yours at d = 0.01, −3, 2, 25 and 500, "
    "and plot it beside kl_estimate.",
)


def exact_kl(logits, ref_logits):
    log_probs, ref_log_probs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)


_generator = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(3, 2, 3, 5, generator=_generator)

check_exact_kl = Exercise(
    right=exact_kl,
    inputs=[(LOGITS[0], LOGITS[1]), (LOGITS[1, 0], LOGITS[2, 0]), (LOGITS[0], LOGITS[0])],
    mistakes=[
        Mistake(
            lambda p, q: exact_kl(q, p),
            "this is KL(reference ‖ policy). The first of the two is the one that is averaged over.",
        ),
        Mistake(
            lambda p, q: (p.softmax(-1) * (p - q)).sum(-1),
            "logits are not log-probabilities yet: log_softmax first. Adding a constant to all logits must change nothing.",
        ),
        Mistake(
            lambda p, q: exact_kl(p, q).sum(), "you added up the places, too. Sum over the vocabulary only: the last dimension."
        ),
        Mistake(lambda p, q: exact_kl(p, q).mean(), "you averaged over the places, too. Return one number for each place."),
        Mistake(
            lambda p, q: exact_kl(p, q) / p.shape[-1],
            "you averaged over the vocabulary. The probabilities already are the weights: sum.",
        ),
        Mistake(
            lambda p, q: (p.log_softmax(-1) - q.log_softmax(-1)).sum(-1),
            "the weights are missing: each token counts with its probability under the policy.",
        ),
        Mistake(
            lambda p, q: p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1)),
            "these are the terms. The KL is their sum over the vocabulary.",
        ),
        Mistake(lambda p, q: -exact_kl(p, q), "the sign is turned around: a KL is never negative."),
        Mistake(
            lambda p, q: -exact_kl(q, p),
            "you took the logarithms the right way round, but weighted with the reference's probabilities.",
        ),
        Mistake(
            lambda p, q: (p.softmax(0) * (p.log_softmax(0) - q.log_softmax(0))).sum(0),
            "you went along the first dimension. The vocabulary is the last: dim=-1.",
        ),
    ],
)

check_leash = Probed(
    probe=leash_gradient,
    right=lambda p, old, ref: ratio(p, old) * kl_estimate(p, ref),
    inputs=[(LOGITS[0, 0, 0], LOGITS[1, 0, 0], LOGITS[2, 0, 0]), (LOGITS[0, 0, 1], LOGITS[1, 0, 1], LOGITS[2, 1, 1])],
    mistakes=[
        Mistake(
            lambda p, old, ref: kl_estimate(p, ref, "k1"),
            "the reference is nowhere in the gradient of k1 as a loss: it drops out. This is no leash.",
        ),
        Mistake(
            lambda p, old, ref: kl_estimate(p, ref, "k2"),
            "k2 has the right gradient on the policy's own samples, but these are an old policy's. The ratio is missing.",
        ),
        Mistake(
            lambda p, old, ref: kl_estimate(p, ref, "k3"),
            "k3 as a loss has the gradient of KL(reference ‖ policy), and that only on the policy's own samples. The ratio is "
            "missing.",
        ),
        Mistake(
            lambda p, old, ref: ratio(p, old).detach() * kl_estimate(p, ref, "k3"),
            "with a detached ratio, k3 has the gradient of KL(reference ‖ policy). Let the gradient flow through the ratio.",
        ),
        Mistake(
            lambda p, old, ref: ratio(p, old).detach() * kl_estimate(p, ref, "k1"),
            "with a detached ratio, k1 has the gradient 0 in the mean. Let the gradient flow through the ratio.",
        ),
        Mistake(
            lambda p, old, ref: ratio(p, old) * kl_estimate(p, ref, "k2"),
            "through the ratio, k2 gives the gradient of its own, biased mean. Detach the ratio, or take k3.",
        ),
        Mistake(
            lambda p, old, ref: ratio(p, old) * kl_estimate(p, ref, "k3").detach(),
            "you detached k3. Then only the ratio carries a gradient, and half of the product rule is lost.",
        ),
        Mistake(
            lambda p, old, ref: ratio(old, p) * kl_estimate(p, ref),
            "the ratio is upside down: it is exp(log_probs − old_log_probs).",
        ),
        Mistake(
            lambda p, old, ref: ratio(p, old) * kl_estimate(ref, p),
            "d is flipped inside k3: d = ref_log_probs − log_probs.",
        ),
        Mistake(
            lambda p, old, ref: -ratio(p, old) * kl_estimate(p, ref),
            "the sign is turned around: this leash pushes the policy away from the reference.",
        ),
        Mistake(
            lambda p, old, ref: ratio(p, ref) * kl_estimate(p, ref),
            "your ratio compares with the reference. The samples come from the old policy: exp(log_probs − old_log_probs).",
        ),
    ],
    otherwise="the mean gradient over samples of the old policy is not that of KL(policy ‖ reference).",
)
