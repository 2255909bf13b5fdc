"""Exercises of notebook 06: the quietest baseline, GAE, reading a reward model at the last real token, the loss of DPO."""

import torch
import torch.nn.functional as F

from grpo_core.lab.checks import Exercise, Mistake, Probed, no_gradient, value_and_gradient
from grpo_core.rivals.gae import gae
from grpo_core.rivals.reward_model import last_positions


def quietest_constant(probabilities, rewards, squares):
    """E[r · |s|²] / E[|s|²]."""
    return (probabilities * rewards * squares).sum() / (probabilities * squares).sum()


check_quietest_constant = Exercise(
    right=quietest_constant,
    inputs=[
        (torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 5.0, 12.0])),
        (torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.0, 1.0, 5.0]), torch.tensor([9.0, 1.0, 4.0])),
        (torch.tensor([0.25, 0.75]), torch.tensor([-4.0, -5.0]), torch.tensor([16.0, 2.0])),
    ],
    mistakes=[
        Mistake(
            lambda p, r, s: (p * r).sum(),
            "this is the expected reward, the exact value. The sizes of the scores are missing.",
        ),
        Mistake(
            lambda p, r, s: (r * s).sum() / s.sum(),
            "the probabilities are missing: a completion that is never drawn must not count.",
        ),
        Mistake(
            lambda p, r, s: (p * r * s.sqrt()).sum() / (p * s.sqrt()).sum(),
            "you weighed by lengths. Variance is about squared lengths, which is what you are given.",
        ),
        Mistake(
            lambda p, r, s: (p * r / s).sum() / (p / s).sum(),
            "you divided by the sizes. The larger a score, the more its weight in the gradient matters.",
        ),
        Mistake(
            lambda p, r, s: (p * r * s).sum(),
            "this is only the upper half. Divide by the expected squared size, or the baseline has the wrong unit.",
        ),
        Mistake(
            lambda p, r, s: (p * r * s).sum() / s.sum(),
            "the lower half is an expectation too: weigh it with the probabilities.",
        ),
        Mistake(
            lambda p, r, s: (p * r * s).mean() / (p * s).sum(),
            "you took a mean above and a sum below. Both are sums over completions, weighed by their probabilities.",
        ),
    ],
)


def _gae(rewards, values, mask, gae_lambda):
    return gae(rewards, values, mask, 1.0, gae_lambda)[0]


def _backward(rewards, values, mask, gae_lambda, next_of, outer=1.0, following=1.0):
    """GAE with exchangeable parts: what stands for V_t+1, a factor on all, and one on what follows."""
    rewards, inside = rewards * mask, values * mask
    deltas, advantages = rewards + next_of(values, inside) - inside, torch.zeros_like(rewards)
    carry = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        advantages[:, t] = carry = outer * (deltas[:, t] + gae_lambda * following * carry)
    return advantages * mask


def _shift(x):
    return F.pad(x[:, 1:], (0, 1))


def _forward(rewards, values, mask, gae_lambda):
    inside = values * mask
    deltas, advantages = rewards * mask + _shift(inside) - inside, torch.zeros_like(rewards)
    carry = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1]):
        advantages[:, t] = carry = deltas[:, t] + gae_lambda * carry
    return advantages * mask


def _unmasked(rewards, values, mask, gae_lambda):
    return _gae(rewards, values, torch.ones_like(mask), gae_lambda)


GAE_MASK = torch.tensor([[True, True, True, False], [True, True, True, True], [True, False, False, False]])
GAE_INPUTS = [
    (torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.6, 0.7, 9.0]]), GAE_MASK[:1], 0.95),
    (
        torch.tensor([[0.1, 0.0, 1.0, 0.0], [0.0, -0.2, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0]]),
        torch.tensor([[0.3, 0.8, 0.1, 3.0], [0.5, 0.4, 0.9, 0.2], [0.6, 7.0, -2.0, 1.0]]),
        GAE_MASK,
        0.5,
    ),
]

check_gae = Exercise(
    right=_gae,
    inputs=GAE_INPUTS,
    mistakes=[
        Mistake(
            _unmasked,
            "you looked behind the end. Behind the last real token V is 0, whatever the critic says there.",
        ),
        Mistake(
            lambda r, v, m, lam: _unmasked(r, v, m, lam) * m,
            "you looked behind the end. The last real token's next value is 0; to blank the result afterwards is too late.",
        ),
        Mistake(
            lambda r, v, m, lam: _gae(r, v, m, 0.0),
            "these are the deltas, as if lambda were 0. Each advantage also holds lambda times the next one.",
        ),
        Mistake(
            lambda r, v, m, lam: _gae(r, v, m, 1.0),
            "lambda is missing: what comes later is to be discounted by it.",
        ),
        Mistake(
            lambda r, v, m, lam: gae(r, v, m, 1.0, lam)[1],
            "these are the returns, which the critic learns. Subtract the values.",
        ),
        Mistake(
            lambda r, v, m, lam: _backward(r, v, m, lam, lambda values, inside: 0.0),
            "V of the next token is missing: delta is the reward plus the *change* of the value.",
        ),
        Mistake(
            lambda r, v, m, lam: _backward(r, v, m, lam, lambda values, inside: 2 * inside - _shift(inside)),
            "the change of the value is turned around: it is the next value minus this one.",
        ),
        Mistake(
            lambda r, v, m, lam: _backward(r, v, m, lam, lambda values, inside: _shift(inside), outer=lam),
            "you multiplied the delta by lambda, too. Lambda belongs to what follows.",
        ),
        Mistake(
            lambda r, v, m, lam: _backward(r, v, m, lam, lambda values, inside: _shift(inside), following=lam),
            "you multiplied by lambda twice in each step.",
        ),
        Mistake(
            _forward,
            "you went from the first token to the last. An advantage is made of what comes after the token: start at the end.",
        ),
        Mistake(
            lambda r, v, m, lam: -_gae(r, v, m, lam),
            "the sign is turned around: a token is good if things went better than the critic had thought.",
        ),
    ],
)


def _read(numbers, mask):
    return numbers.gather(1, last_positions(mask).unsqueeze(1)).squeeze(1)


def _at(position):
    return lambda numbers, mask: numbers.gather(1, position(mask).unsqueeze(1)).squeeze(1)


NUMBERS = torch.tensor([[1.5, -2.0, 3.0, 0.25, 8.0], [-1.0, 4.0, 0.5, 2.5, -3.0], [7.0, -6.0, 5.5, 9.0, 1.25]])
TEXT_MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]]).bool()

check_read_last = Exercise(
    right=_read,
    inputs=[
        (NUMBERS, TEXT_MASK),
        (-NUMBERS.flip(0), TEXT_MASK),
        (NUMBERS[:2], torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 0]]).bool()),
    ],
    mistakes=[
        Mistake(
            lambda numbers, mask: numbers[:, -1],
            "you read the last column. With padding on the right that is no token of the text.",
        ),
        Mistake(
            _at(lambda mask: mask.sum(dim=1) - 1),
            "number of tokens minus 1: that is right only where the padding is on the right. Prompts are padded on the left.",
        ),
        Mistake(
            _at(lambda mask: mask.long().argmax(dim=1)),
            "you read the first real token. It has not seen the text.",
        ),
        Mistake(
            _at(lambda mask: mask.long().argmin(dim=1) - 1 + mask.shape[1] * (mask.long().argmin(dim=1) == 0)),
            "you went back one from the first padding. That padding may stand on the left.",
        ),
        Mistake(
            lambda numbers, mask: (numbers * mask).sum(dim=1) / mask.sum(dim=1),
            "this is the mean over the text. Only the last real token has seen all of it.",
        ),
        Mistake(
            lambda numbers, mask: (numbers * mask).sum(dim=1),
            "you added up the whole text. A longer text would score more only for its length.",
        ),
        Mistake(
            lambda numbers, mask: (numbers * mask)[:, -1],
            "you read the last column, and padding gives 0 there.",
        ),
        Mistake(
            lambda numbers, mask: last_positions(mask),
            "these are the positions, and they are right. Return the numbers that stand there.",
        ),
    ],
)


def dpo(log_probs, ref_log_probs, mask, beta):
    """−log sigmoid(beta · margin), averaged over pairs; row 0 of each argument is for the chosen, row 1 for the rejected."""
    return -F.logsigmoid(beta * _margin(log_probs - ref_log_probs, mask)).mean()


def _margin(moved, mask):
    chosen, rejected = torch.where(mask, moved, 0.0).sum(dim=2)
    return chosen - rejected


def _mean_margin(lp, ref, mask):
    chosen, rejected = torch.where(mask, lp - ref, 0.0).sum(dim=2) / mask.sum(dim=2)
    return chosen - rejected


def _pairs(count, length, seed):
    """Log-probs of policy and reference, and a mask: (2, pairs, tokens), chosen and rejected of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    log_probs, ref = (-3 * torch.rand(2, count, length, generator=generator) for _ in range(2))
    lengths = torch.randint(1, length + 1, (2, count, 1), generator=generator)
    return log_probs, ref, torch.arange(length) < lengths


check_dpo_loss = Probed(
    probe=value_and_gradient,
    otherwise="the loss or its gradient is off. Work out one pair of two tokens by hand.",
    right=dpo,
    inputs=[(*_pairs(3, 4, seed=0), 0.5), (*_pairs(2, 5, seed=1), 3.0), (*_pairs(4, 3, seed=2), 0.1)],
    mistakes=[
        Mistake(
            lambda lp, ref, mask, beta: -F.logsigmoid(beta * _mean_margin(lp, ref, mask)).mean(),
            "you averaged over tokens. The log-prob of a completion is the sum over its tokens.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: dpo(lp, torch.zeros_like(ref), mask, beta),
            "the reference is missing. At the start the loss would not be ln 2, and nothing would hold the policy.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -F.logsigmoid(-beta * _margin(lp - ref, mask)).mean(),
            "chosen and rejected are exchanged: this makes the wrong completion likelier.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -(beta * _margin(lp - ref, mask)).mean(),
            "log sigmoid is missing. Without it the push never ends, however well the pair is told apart.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -torch.sigmoid(beta * _margin(lp - ref, mask)).mean(),
            "the logarithm is missing: the loss is −log sigmoid.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -dpo(lp, ref, mask, beta),
            "the sign is turned around: the loss is *minus* log sigmoid.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -beta * F.logsigmoid(_margin(lp - ref, mask)).mean(),
            "beta stands outside. It scales the margin, inside of the sigmoid.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -F.logsigmoid(_margin(lp - ref, mask) / beta).mean(),
            "you divided by beta. The implied reward is beta times the change of the log-prob.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -F.logsigmoid(beta * _margin(lp - ref, torch.ones_like(mask))).mean(),
            "you also counted what stands behind the EOS. Only tokens inside the mask belong to a completion.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -F.logsigmoid(beta * _margin(lp - ref, mask)).sum(),
            "you summed over pairs. The loss is their mean.",
        ),
        Mistake(
            lambda lp, ref, mask, beta: -F.logsigmoid(beta * torch.where(mask, lp - ref, 0.0).sum(dim=(0, 2))).mean(),
            "you added chosen and rejected. The margin is their difference.",
        ),
        no_gradient(dpo),
    ],
)
