"""Exercises of notebook 07: a verifier, where a gain comes from, and which completions were cut off."""

import torch

from grpo_core.lab.checks import Exercise, Mistake


def _verify(completion, answer):
    return float(completion.count("=") == 1 and completion.endswith(f"={answer};"))


check_verify = Exercise(
    right=_verify,
    inputs=[
        (">1>2>2=4;", "4"), ("=4;", "4"), (">3>3=4;", "4"), (">4=1;", "4"), ("=1;", "4"), ("=4", "4"), (">1>4;", "4"),
        ("=1=4;", "4"), ("=4=1;", "4"), (";", "4"), (">1=2;", "2"), ("=14;", "4"), ("=4>1;", "4"), (">4=2;", "2"),
    ],
    mistakes=[
        Mistake(
            lambda completion, answer: float(answer in completion),
            "you pay for the right cup anywhere. Then '>4=1;' is paid, too: a cup on the way, and a wrong answer.",
        ),
        Mistake(
            lambda completion, answer: float(f"={answer}" in completion),
            "you look for the answer, but not at the end: '=4=1;' is paid, and so is '=4' without the EOS.",
        ),
        Mistake(
            lambda completion, answer: float(f"={answer};" in completion),
            "two answers are paid if the last one is right: '=1=4;'. Somebody will find out that guessing twice pays.",
        ),
        Mistake(
            lambda completion, answer: float(completion == f"={answer};"),
            "you pay for direct answers only. What stands before the answer must not matter.",
        ),
        Mistake(
            lambda completion, answer: float(completion.endswith(f"{answer};")),
            "'>1>4;' is paid, which shows a cup and gives no answer. Ask for the '='.",
        ),
        Mistake(
            lambda completion, answer: float(completion.count("=") == 1 and completion.rstrip(";").endswith(f"={answer}")),
            "an answer that never ends is paid: '=4'. Without the EOS the policy would not have stopped there.",
        ),
        Mistake(
            lambda completion, answer: 1.0 - _verify(completion, answer),
            "it is turned around: you pay for everything that is wrong.",
        ),
        Mistake(
            lambda completion, answer: _verify(completion, answer) * len(completion),
            "you pay more for longer chains. The answer alone counts: 1.0 or 0.0.",
        ),
        Mistake(
            lambda completion, answer: _verify(completion, answer) * (completion.count(">") > 0),
            "you do not pay for a direct answer that is right. The verifier must not ask for steps.",
        ),
    ],
)  # fmt: skip

_SHARES = [  # Shares before and after, accuracies before and after.
    tuple(torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.25, 0.3, 0.9], [0.3, 0.5, 0.95]])),
    tuple(torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.2, 0.9], [0.4, 0.7]])),
]


def _shift(share_before, share_after, accuracy_before, accuracy_after):
    return ((share_after - share_before) * accuracy_before).sum()


check_shift = Exercise(
    right=_shift,
    inputs=_SHARES,
    mistakes=[
        Mistake(
            lambda s0, s1, a0, a1: (s1 * a1 - s0 * a0).sum(),
            "this is the whole gain. Let the shares move, but keep the accuracy of each length as it was.",
        ),
        Mistake(
            lambda s0, s1, a0, a1: (s1 * (a1 - a0)).sum(),
            "this is the other part: what each length gained by getting better.",
        ),
        Mistake(
            lambda s0, s1, a0, a1: ((s1 - s0) * a1).sum(),
            "you used the accuracies after the training. They hold what it taught; use those from before.",
        ),
        Mistake(
            lambda s0, s1, a0, a1: (s0 * (a1 - a0)).sum(),
            "you kept the shares and let the accuracies move. It is asked the other way round.",
        ),
        Mistake(
            lambda s0, s1, a0, a1: (s1 * a0).sum(),
            "this is the accuracy that the new shares would have. Take off the accuracy before: it is the gain that is asked.",
        ),
        Mistake(
            lambda s0, s1, a0, a1: (s1 - s0) * a0,
            "this is the part of each length. Add them up.",
        ),
        Mistake(
            lambda s0, s1, a0, a1: _shift(s0, s1, a0, a1) / (s1 * a1 - s0 * a0).sum(),
            "this is the part of the gain as a share of all. Return the part itself.",
        ),
        Mistake(
            lambda s0, s1, a0, a1: _shift(s1, s0, a0, a1),
            "the sign is turned around: after minus before.",
        ),
    ],
)

EOS = 12
# Behind the EOS stands what a sampler left there: more EOS, or anything. The first row of each batch ends at the very limit.
_CUT = [
    (torch.tensor([[10, 3, 11, EOS], [11, 2, EOS, EOS], [10, 3, 10, 2], [EOS, 5, 5, 5]]), EOS),
    (torch.tensor([[10, 1, EOS], [10, 3, 10], [EOS, 0, 7], [11, EOS, EOS]]), EOS),
    (torch.tensor([[4, 4, 4], [4, 1, 4], [1, 4, 4]]), 1),
]


def _through_eos(ids, eos):
    is_eos = ids == eos
    return is_eos.long().cumsum(dim=1) - is_eos.long() == 0


def _keep(mask, ids, eos):
    return mask & (ids == eos).any(dim=1, keepdim=True)


check_leave_out_cut = Exercise(
    right=_keep,
    inputs=[(_through_eos(ids, eos), ids, eos) for ids, eos in _CUT],
    mistakes=[
        Mistake(
            lambda mask, ids, eos: mask & ~mask.all(dim=1, keepdim=True),
            "you left out every completion that fills all places. One of them ends with its EOS in the last place: not cut.",
        ),
        Mistake(
            lambda mask, ids, eos: mask & (ids[:, -1:] == eos),
            "you looked at the last place only. Behind an early EOS may stand anything.",
        ),
        Mistake(
            lambda mask, ids, eos: mask & ~(ids == eos).any(dim=1, keepdim=True),
            "it is turned around: you kept those that were cut off.",
        ),
        Mistake(
            lambda mask, ids, eos: mask & (ids != eos),
            "you took the EOS out of the loss. It must be trained, or the policy never learns to stop.",
        ),
        Mistake(
            lambda mask, ids, eos: mask,
            "nothing was left out. Which rows hold no EOS at all?",
        ),
        Mistake(
            lambda mask, ids, eos: (ids == eos).any(dim=1, keepdim=True).expand_as(mask),
            "the right rows, but now the places behind the EOS count as well. Keep the old mask: new = mask & ….",
        ),
        Mistake(
            lambda mask, ids, eos: (ids == eos).any(dim=1),
            "this says which completions ended, one number for each. Lay it over the mask.",
        ),
    ],
)
