"""Exercises of notebook 05: the loss from its pieces, a paired interval, how many problems a comparison needs."""

import math

import torch

from grpo_core.lab.checks import Exercise, Mistake, Probed, no_gradient, value_and_gradient


def _loss(log_probs, old, ref, advantages, mask, clip_eps, beta, pick=torch.min, leash=+1, surrogate=-1):
    ratio, per_row = (log_probs - old).exp(), advantages[:, None]
    d = ref - log_probs
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    per_token = surrogate * pick(ratio * per_row, clipped * per_row) + leash * beta * (d.exp() - d - 1)
    return per_token[mask].mean()


def _sequence_mean(log_probs, old, ref, advantages, mask, clip_eps, beta):
    rows = [[x[i : i + 1] for x in (log_probs, old, ref, advantages, mask)] for i in range(len(mask))]
    return torch.stack([_loss(*row, clip_eps, beta) for row in rows]).mean()


def _flipped_kl(log_probs, old, ref, advantages, mask, clip_eps, beta):
    d = log_probs - ref
    return _loss(log_probs, old, ref, advantages, mask, clip_eps, 0.0) + beta * (d.exp() - d - 1)[mask].mean()


def _k1(log_probs, old, ref, advantages, mask, clip_eps, beta):
    return _loss(log_probs, old, ref, advantages, mask, clip_eps, 0.0) + beta * (log_probs - ref)[mask].mean()


def _along_tokens(log_probs, old, ref, advantages, mask, clip_eps, beta):
    ratio, d = (log_probs - old).exp(), ref - log_probs
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    return (beta * (d.exp() - d - 1) - surrogate)[mask].mean()


def _loss_inputs(rows: int, seed: int, beta: float) -> tuple:
    """As many rows as tokens, so that advantages laid along the wrong side give a number, not an error."""
    generator = torch.Generator().manual_seed(seed)
    log_probs, old, ref = (-2 * torch.rand(rows, rows, generator=generator) for _ in range(3))
    advantages = torch.randn(rows, generator=generator)
    mask = torch.arange(rows)[None] < torch.randint(1, rows + 1, (rows, 1), generator=generator)
    return log_probs, old, ref, advantages, mask, 0.2, beta


check_grpo_loss = Probed(
    probe=value_and_gradient,
    otherwise="the loss or its gradient is off. Check surrogate and leash one after the other.",
    right=_loss,
    inputs=[_loss_inputs(3, 0, 0.08), _loss_inputs(4, 1, 0.5), _loss_inputs(5, 2, 0.0)],
    mistakes=[
        Mistake(
            lambda *x: _loss(*x, surrogate=+1),
            "the surrogate has the wrong sign. It is to be made large, and an optimizer makes the loss small: minus.",
        ),
        Mistake(
            lambda *x: _loss(*x, leash=-1),
            "the leash has the wrong sign: you reward the policy for running away. The KL is a cost: plus beta times it.",
        ),
        Mistake(
            lambda *x: -_loss(*x),
            "both signs are turned around: you return the objective, to be maximized. The loss is its negative.",
        ),
        Mistake(lambda *x: _loss(*x[:6], 0.0), "the leash is missing: add beta times the KL estimate."),
        Mistake(lambda *x: _loss(*x[:6], 1.0), "you add the KL estimate without beta in front of it."),
        Mistake(
            lambda *x: _loss(*x[:6], x[6] ** 2),
            "beta came in twice: once is enough.",
        ),
        Mistake(
            _flipped_kl,
            "d is turned around in the KL estimate: d = ref_log_probs − log_probs, and k3 = exp(d) − d − 1.",
        ),
        Mistake(_k1, "your leash is k1, log_probs − ref_log_probs. Here it is k3: exp(d) − d − 1."),
        Mistake(
            lambda *x: _loss(*x, pick=torch.max),
            "you took the maximum of the two products. It is the minimum, for both signs of the advantage.",
        ),
        Mistake(
            lambda *x: _loss(*x, pick=lambda plain, clipped: clipped),
            "you took the clipped product alone. Without the minimum, a move too far the wrong way is no longer punished.",
        ),
        Mistake(
            lambda *x: _loss(*x, pick=lambda plain, clipped: plain),
            "you never clip. Take the minimum of ratio · A and clip(ratio) · A.",
        ),
        Mistake(
            lambda *x: _loss(x[0], 2 * x[0] - x[1], *x[2:]),
            "the ratio is turned around: it is exp(log_probs − old_log_probs).",
        ),
        Mistake(
            lambda *x: _loss(x[0], x[2], *x[2:]),
            "you compare the ratio with the reference. The ratio is against the policy that sampled: old.",
        ),
        Mistake(
            lambda *x: _loss(*x[:4], torch.ones_like(x[4]), *x[5:]),
            "you averaged over all places, also those behind the end of a completion. Use the mask.",
        ),
        Mistake(
            lambda *x: _loss(*x) * x[4].sum() / x[4].numel(),
            "you left out the masked tokens, but still divided by the number of all places. Divide by the tokens that count.",
        ),
        Mistake(
            lambda *x: _loss(*x) * x[4].sum(),
            "you took the sum over the tokens. Take their mean, or the step grows with the batch.",
        ),
        Mistake(
            _sequence_mean,
            "you averaged over each completion first, then over completions. That is a choice, too ('sequence'); "
            "here each token weighs the same.",
        ),
        Mistake(
            _along_tokens,
            "the advantages ran along the tokens. There is one for each row: advantages[:, None].",
        ),
        no_gradient(_loss),
    ],
)


def _paired(a, b, t):
    d = a - b
    return d.mean(), t * d.std() / math.sqrt(len(d))


check_paired_interval = Exercise(
    right=_paired,
    inputs=[
        (torch.tensor([0.72, 0.80, 0.78, 0.74, 0.75]), torch.tensor([0.69, 0.76, 0.77, 0.69, 0.73]), 2.776),
        (torch.tensor([0.5, 0.7, 0.6]), torch.tensor([0.55, 0.68, 0.7]), 4.303),
    ],
    mistakes=[
        Mistake(
            lambda a, b, t: (a.mean() - b.mean(), t * math.sqrt((a.var() + b.var()) / len(a))),
            "this is the interval of two unrelated samples. Take the difference of each seed first, then their spread.",
        ),
        Mistake(
            lambda a, b, t: (_paired(a, b, t)[0], t * (a - b).std()),
            "this says where one more difference would fall. The mean of n is steadier: divide by √n.",
        ),
        Mistake(
            lambda a, b, t: (_paired(a, b, t)[0], t * (a - b).std() / len(a)),
            "you divided by n. The spread of a mean falls with √n.",
        ),
        Mistake(
            lambda a, b, t: (_paired(a, b, t)[0], t * (a - b).std(correction=0) / math.sqrt(len(a))),
            "you divided by n inside the standard deviation. Student's interval needs the sample's: divide by n − 1.",
        ),
        Mistake(
            lambda a, b, t: _paired(a, b, 1.96),
            "you used 1.96 instead of t. With so few seeds the spread itself is uncertain; that is what t is for.",
        ),
        Mistake(
            lambda a, b, t: _paired(a, b, 1.0),
            "this is one standard error. Multiply it by t.",
        ),
        Mistake(
            lambda a, b, t: (_paired(a, b, t)[0], t * (a - b).var() / math.sqrt(len(a))),
            "you used the variance. Its square root is the standard deviation.",
        ),
        Mistake(
            lambda a, b, t: _paired(b, a, t),
            "you took b − a. A positive difference is to mean that a is better.",
        ),
        Mistake(
            lambda a, b, t: (_paired(a, b, t)[0] - _paired(a, b, t)[1], _paired(a, b, t)[0] + _paired(a, b, t)[1]),
            "these are the ends of the interval. Return its middle and its half-width.",
        ),
        Mistake(
            lambda a, b, t: _paired(a, b, 2 * t),
            "this is the whole width. Return the half.",
        ),
    ],
)

check_problems_needed = Exercise(
    right=lambda p, h: 1.96**2 * p * (1 - p) / h**2,
    inputs=[(0.8, 0.03), (0.35, 0.05), (0.5, 0.01)],
    mistakes=[
        Mistake(
            lambda p, h: p * (1 - p) / h**2, "1.96 is missing: this makes one standard error as wide as h, not 1.96 of them."
        ),
        Mistake(lambda p, h: 1.96 * p * (1 - p) / h**2, "when you squared both sides, 1.96 was to be squared, too."),
        Mistake(lambda p, h: 1.96 * math.sqrt(p * (1 - p)) / h, "this is √n. Square it."),
        Mistake(lambda p, h: 1.96**2 * p * (1 - p) / h, "h is to be squared: half the width costs four times the problems."),
        Mistake(lambda p, h: 1.96**2 * p / h**2, "the variance of a right or wrong answer is p (1 − p), not p."),
        Mistake(
            lambda p, h: 1.96**2 * math.sqrt(p * (1 - p)) / h**2,
            "you kept the root over p (1 − p). When both sides are squared, it goes.",
        ),
        Mistake(lambda p, h: 4 * 1.96**2 * p * (1 - p) / h**2, "you took h for the whole width. It is the half."),
        Mistake(lambda p, h: 1.96**2 * p * (1 - p) / (4 * h**2), "you doubled h. It is the half-width already."),
        Mistake(
            lambda p, h: math.ceil(1.96**2 * p * (1 - p) / h**2),
            "right, but you rounded up. Return the number as it comes out.",
        ),
        Mistake(lambda p, h: 1.96 * math.sqrt(p * (1 - p) / h), "this is a half-width for h problems. Solve for n."),
    ],
)
