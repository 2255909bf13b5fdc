"""Exercises of notebook 03: the sign table, the inverted clip, the clip fraction, the mean over completions."""

import torch

from grpo_core.grpo import aggregate
from grpo_core.lab.checks import Exercise, Mistake, Probed, no_gradient, value_and_gradient
from grpo_core.surrogate import clip_binds, clipped_surrogate

check_slopes = Exercise(
    right=lambda advantage: [advantage, advantage, 0.0] if advantage > 0 else [0.0, advantage, advantage],
    inputs=[(1.0,), (-1.0,), (2.0,), (-0.5,)],
    mistakes=[
        Mistake(
            lambda a: [0.0, a, 0.0],
            "you put 0 on both sides of the band. That is the slope of the clipped half alone; the minimum of the two has "
            "slope 0 on one side only.",
        ),
        Mistake(
            lambda a: [a, a, 0.0],
            "for A > 0 it is right. For A < 0 the flat side is below the band: there r · A is the larger of the two, and the "
            "minimum takes the constant.",
        ),
        Mistake(
            lambda a: [0.0, a, a],
            "for A < 0 it is right. For A > 0 the flat side is above the band: there r · A is the larger of the two, and the "
            "minimum takes the constant.",
        ),
        Mistake(
            lambda a: [0.0, a, a] if a > 0 else [a, a, 0.0],
            "this is the table of the maximum: tokens that went too far are pushed on, and those that went the wrong way "
            "are left alone.",
        ),
        Mistake(lambda a: [a, a, a], "this is the slope without the clip."),
        Mistake(
            lambda a: [1.0, 1.0, 0.0] if a > 0 else [0.0, -1.0, -1.0],
            "right for A = ±1. In general the slope of r · A by r is A itself, so a larger advantage pushes harder.",
        ),
        Mistake(
            lambda a: [abs(a), abs(a), 0.0] if a > 0 else [0.0, abs(a), abs(a)],
            "the zeros are right, but for a negative advantage the objective falls as the ratio grows: its slope is negative.",
        ),
        Mistake(
            lambda a: [0.5 * a, a, 1.2 * a] if a > 0 else [0.8 * a, a, 1.5 * a],
            "these are the values of the objective. The slope says how they change with the ratio.",
        ),
    ],
)

RATIOS = torch.tensor([[0.5, 1.5, 1.0], [0.5, 1.5, 1.1], [1.5, 0.9, 3.0], [0.1, 0.7, 2.0]])
OLD = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -1.2, -0.8], [-1.5, -0.2, -3.0], [-0.1, -0.7, -1.0]])
ADVANTAGES = torch.tensor([1.5, -1.0, 0.5, -0.7])
SURROGATE_INPUTS = [  # As many rows as tokens: advantages that run the wrong way raise no error, and must be found.
    (OLD[:3] + RATIOS[:3].log(), OLD[:3], ADVANTAGES[:3], 0.2),
    (OLD[1:] + RATIOS[1:].log(), OLD[1:], ADVANTAGES[1:], 0.1),
]


def _parts(log_probs, old_log_probs, advantages, clip_eps):
    """ratio, clipped ratio, and the advantage of each row, as a column."""
    ratio = (log_probs - old_log_probs).exp()
    return ratio, ratio.clamp(1 - clip_eps, 1 + clip_eps), advantages.unsqueeze(1)


def _max_if_negative(*arguments):
    r, clipped, a = _parts(*arguments)
    return torch.where(a >= 0, torch.minimum(r * a, clipped * a), torch.maximum(r * a, clipped * a))


def _max(*arguments):
    r, clipped, a = _parts(*arguments)
    return torch.maximum(r * a, clipped * a)


def _no_min(*arguments):
    _, clipped, a = _parts(*arguments)
    return clipped * a


def _no_clip(*arguments):
    r, _, a = _parts(*arguments)
    return r * a


def _clip_the_product(log_probs, old_log_probs, advantages, clip_eps):
    r, _, a = _parts(log_probs, old_log_probs, advantages, clip_eps)
    return torch.minimum(r * a, (r * a).clamp(1 - clip_eps, 1 + clip_eps))


def _with_ratio(ratio):
    """The right rule with a wrong ratio."""

    def wrong(log_probs, old_log_probs, advantages, clip_eps):
        r, a = ratio(log_probs, old_log_probs), advantages.unsqueeze(1)
        return torch.minimum(r * a, r.clamp(1 - clip_eps, 1 + clip_eps) * a)

    return wrong


def _upper_side_only(log_probs, old_log_probs, advantages, clip_eps):
    r, _, a = _parts(log_probs, old_log_probs, advantages, clip_eps)
    return torch.minimum(r * a, r.clamp(max=1 + clip_eps) * a)


def _along_the_tokens(log_probs, old_log_probs, advantages, clip_eps):
    r, clipped, _ = _parts(log_probs, old_log_probs, advantages, clip_eps)
    return torch.minimum(r * advantages, clipped * advantages)


check_surrogate = Probed(
    probe=value_and_gradient,
    otherwise="the objective or its gradient is off. Compare it with the table of section 3.3.",
    right=clipped_surrogate,
    inputs=SURROGATE_INPUTS,
    mistakes=[
        Mistake(
            _max_if_negative,
            "the bug is still there: the maximum for negative advantages. A token that became too likely and is bad (A = −1, "
            "ratio 1.5) would not be pushed back.",
        ),
        Mistake(_max, "you took the maximum for both signs. The objective is the smaller, the more cautious of the two."),
        Mistake(
            _no_min,
            "you clipped, but took no minimum. Then a token that went the wrong way has slope 0 too, and is never pulled back.",
        ),
        Mistake(_no_clip, "this is ratio · A without any clip."),
        Mistake(
            _clip_the_product, "you clipped the product ratio · A. The band is for the ratio; A is multiplied on afterwards."
        ),
        Mistake(
            _with_ratio(lambda new, old: new - old), "the ratio is exp(log_prob − old_log_prob), not the difference itself."
        ),
        Mistake(_with_ratio(lambda new, old: new / old), "you divided log-probs. Divide the probabilities: exp(new − old)."),
        Mistake(_with_ratio(lambda new, old: (old - new).exp()), "the ratio is upside down: new over old, exp(new − old)."),
        Mistake(_upper_side_only, "you clipped above only. For negative advantages it is the lower side that binds."),
        Mistake(
            lambda *arguments: -clipped_surrogate(*arguments),
            "this is the loss. The exercise wants the objective, which is to be made large: drop the minus.",
        ),
        Mistake(
            _along_the_tokens,
            "you multiplied (N, T) by (N,), and the advantages ran along the tokens. One row has one advantage: "
            "advantages.unsqueeze(1).",
        ),
        no_gradient(clipped_surrogate),
    ],
)

MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [True, True, False]])
FRACTION_INPUTS = [
    (torch.tensor([[1.5], [1.5], [1.5], [0.9]]), torch.tensor([1.0, 1.0, -1.0, 1.0]), torch.ones(4, 1, dtype=torch.bool), 0.2),
    (RATIOS, ADVANTAGES, MASK, 0.2),
    (RATIOS.flip(1), -ADVANTAGES, MASK, 0.3),
    (RATIOS, ADVANTAGES.clamp(max=0), MASK, 0.2),
]


def _binds(ratios, advantages, mask, clip_eps):
    return clip_binds(ratios.log(), torch.zeros_like(ratios), advantages, clip_eps)


def _outside(ratios, clip_eps):
    return (ratios < 1 - clip_eps) | (ratios > 1 + clip_eps)


def _share(binds, mask):
    return binds[mask].float().mean()


check_clip_fraction = Exercise(
    right=lambda *arguments: _share(_binds(*arguments), arguments[2]),
    inputs=FRACTION_INPUTS,
    mistakes=[
        Mistake(
            lambda r, a, mask, eps: _share(_outside(r, eps), mask),
            "you counted every ratio outside the band. The clip binds on one side only: above for A > 0, below for A < 0.",
        ),
        Mistake(
            lambda r, a, mask, eps: _share(_outside(r, eps) & ~_binds(r, a, mask, eps), mask),
            "you counted the wrong sides: these are the tokens that are pushed back although they are outside the band.",
        ),
        Mistake(
            lambda r, a, mask, eps: _share((r > 1 + eps) & (a.unsqueeze(1) > 0), mask),
            "you counted the upper side only. For a negative advantage the clip binds below the band.",
        ),
        Mistake(
            lambda r, a, mask, eps: _share((r < 1 - eps) & (a.unsqueeze(1) < 0), mask),
            "you counted the lower side only. For a positive advantage the clip binds above the band.",
        ),
        Mistake(
            lambda r, a, mask, eps: _binds(r, a, mask, eps).float().mean(),
            "you did not use the mask: what stands behind the EOS is no token of the completion.",
        ),
        Mistake(
            lambda r, a, mask, eps: (_binds(r, a, mask, eps) & mask).float().mean(),
            "you masked the tokens that bind, but divided by all positions. Divide by the number of tokens in the mask.",
        ),
        Mistake(
            lambda r, a, mask, eps: 1 - _share(_binds(r, a, mask, eps), mask),
            "this is the share of tokens that the clip leaves alone.",
        ),
        Mistake(
            lambda r, a, mask, eps: (_binds(r, a, mask, eps) & mask).sum(),
            "this is a number of tokens. Divide by the number of tokens in the mask.",
        ),
    ],
)

PER_TOKEN = torch.tensor([[1.0, 9.0, -7.0], [-1.0, -0.5, -2.0], [0.5, 1.5, 9.0]])
LENGTHS = torch.tensor([1, 3, 2]).unsqueeze(1)
COMPLETION_MASK = torch.arange(3) < LENGTHS

check_sequence_mean = Exercise(
    right=lambda per_token, mask: aggregate(per_token, mask, "sequence"),
    inputs=[
        (PER_TOKEN, COMPLETION_MASK),
        (PER_TOKEN[:2], COMPLETION_MASK[:2]),
        (-2 * PER_TOKEN.flip(0), COMPLETION_MASK.flip(0)),
    ],
    mistakes=[
        Mistake(
            lambda x, mask: x[mask].mean(),
            "this is the mean over all tokens, in which a long completion weighs more. First take the mean of each completion.",
        ),
        Mistake(lambda x, mask: x.mean(), "you averaged over everything, also over what stands behind the EOS. Use the mask."),
        Mistake(
            lambda x, mask: (x * mask).sum(dim=1).mean(),
            "you added up each completion's tokens, but did not divide by its length.",
        ),
        Mistake(
            lambda x, mask: (x * mask).mean(),
            "you divided by the number of columns. That is a constant divisor, as Dr. GRPO has; here each row is divided by "
            "its own length.",
        ),
        Mistake(
            lambda x, mask: (x.sum(dim=1) / mask.sum(dim=1)).mean(),
            "the lengths are right, but what stands behind the EOS is still in the sums. Multiply by the mask first.",
        ),
        Mistake(
            lambda x, mask: ((x * mask).sum(dim=1) / mask.sum(dim=1)).sum(),
            "you added up the completions' means. Take their mean.",
        ),
        Mistake(
            lambda x, mask: (x * mask).sum(dim=1) / mask.sum(dim=1),
            "these are the means of the completions. Now take the mean of those.",
        ),
    ],
)
