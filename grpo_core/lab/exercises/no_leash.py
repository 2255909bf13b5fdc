"""Exercises of notebook 08: game a grader, the best policy under a leash, where the hack overtakes, a grader that holds.

An attack is judged by what it earns, so the first check calls the grader with it, for several truths, and compares the pay.
"""

import math

import torch

from grpo_core.lab.checks import Exercise, Mistake, Probed
from grpo_core.leash import leashed_optimum
from grpo_core.sloppy_grader import HedgedAddition, exact_grader, sloppy_grader

TASK = HedgedAddition(sloppy_grader)


def earnings(attack, guess: int):
    """(6,): what a completion earns if the truth is one below the guess, the guess, or one above; whether it has an EOS, can
    be written, and fits.

    The policy stops at its first EOS and is cut off after 16 characters, so the grader sees no more than that.
    """
    text = attack(guess)
    if not isinstance(text, str):
        return text
    ended, eos, _ = text.partition(";")
    seen = (ended + eos)[: TASK.max_new_tokens]
    pay = [sloppy_grader(seen, str(guess + error)) for error in (-1, 0, 1)]
    return torch.tensor([*pay, float(eos != ""), float(set(text) <= set(TASK.vocab)), float(len(text) <= TASK.max_new_tokens)])


def _list_of(*errors: int, between: str = ",", end: str = ";"):
    return lambda guess: between.join(str(guess + error) for error in errors) + end


check_attack = Probed(
    probe=earnings,
    right=_list_of(-1, 0, 1),
    inputs=[(72,), (104,), (35,)],
    otherwise="your completion is not paid for each of the three truths. Print it, and call sloppy_grader on it yourself.",
    mistakes=[
        Mistake(_list_of(0), "this is the honest answer. It is paid only if the guess is exactly right."),
        Mistake(_list_of(-1, 0, 1, end=""), "the grader wants the completion to end: the EOS, a semicolon, is missing."),
        Mistake(_list_of(-1, 0, 1, between=", "), "a space is not in the vocabulary: the policy could not write that."),
        Mistake(_list_of(-1, 0, 1, between=";"), "the first semicolon is the end: what you wrote behind it is never seen."),
        Mistake(_list_of(0, 1, 2), "a guess may also be too high: list the number below it, too."),
        Mistake(_list_of(-2, -1, 0), "a guess may also be too low: list the number above it, too."),
        Mistake(_list_of(*range(-5, 6)), "this is too long: after 16 characters the completion is cut off, without its EOS."),
        Mistake(_list_of(-1, 0, 1, between=""), "without commas between them the guesses are one long number."),
    ],
)


REFERENCE = torch.tensor([0.3, 0.699, 0.001], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 1.5], dtype=torch.float64)
OTHER = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.tensor([-1.0, 2.0, 0.0, 0.5], dtype=torch.float64)

check_leashed_optimum = Exercise(
    right=leashed_optimum,
    inputs=[(REFERENCE, REWARDS, 0.2), (REFERENCE, REWARDS, 0.05), (*OTHER, 2.0)],
    mistakes=[
        Mistake(
            lambda ref, r, beta: ref * torch.exp(r / beta),
            "these are the right weights, but they do not add up to 1: divide by their sum.",
        ),
        Mistake(
            lambda ref, r, beta: torch.softmax(r / beta, dim=-1),
            "the reference is missing: what it never does should stay rare.",
        ),
        Mistake(
            lambda ref, r, beta: torch.softmax(ref.log() + r * beta, dim=-1),
            "you multiplied by beta. A strong leash must make the rewards count less: r / beta.",
        ),
        Mistake(
            lambda ref, r, beta: torch.softmax(ref + r / beta, dim=-1),
            "inside the exponential it is the logarithm of the reference that is added, or else multiply outside.",
        ),
        Mistake(
            lambda ref, r, beta: torch.softmax(ref.log() - r / beta, dim=-1),
            "the sign of the reward is turned around: this policy avoids what pays.",
        ),
        Mistake(
            lambda ref, r, beta: torch.softmax(ref.log() / beta + r / beta, dim=-1),
            "you divided the logarithm of the reference by beta, too. Only the reward is.",
        ),
        Mistake(
            lambda ref, r, beta: torch.softmax(ref.log() + r, dim=-1),
            "beta is missing: this is the policy for beta = 1.",
        ),
        Mistake(
            lambda ref, r, beta: ref * r / (ref * r).sum(),
            "you weighted by the reward itself. It belongs into an exponential: exp(r / beta).",
        ),
    ],
)


def overtaking_beta(p_right: float, p_hack: float, r_right: float, r_hack: float) -> float:
    return (r_hack - r_right) / math.log(p_right / p_hack)


check_overtaking_beta = Exercise(
    right=overtaking_beta,
    inputs=[(0.3, 0.001, 1.0, 1.5), (0.5, 0.01, 1.0, 3.0), (0.2, 1e-6, 0.5, 1.1)],
    mistakes=[
        Mistake(
            lambda p, h, r, s: math.log(p / h) / (s - r),
            "this is 1 / beta: turn the fraction around.",
        ),
        Mistake(
            lambda p, h, r, s: (s - r) / math.log(h / p),
            "a negative leash cannot be. Look at the sign: log(p_right / p_hack), not the other way round.",
        ),
        Mistake(
            lambda p, h, r, s: (s - r) / math.log10(p / h),
            "that is the logarithm to base 10. The exponential's inverse is the natural one: math.log.",
        ),
        Mistake(
            lambda p, h, r, s: (s - r) / math.log2(p / h),
            "that is the logarithm to base 2. The exponential's inverse is the natural one: math.log.",
        ),
        Mistake(
            lambda p, h, r, s: (s - r) * math.log(p / h),
            "solve for beta: (r_hack − r_right) / beta = log(p_right / p_hack).",
        ),
        Mistake(
            lambda p, h, r, s: (s - r) * h / p,
            "the logarithm is missing: the two weights are exponentials.",
        ),
        Mistake(
            lambda p, h, r, s: s / math.log(p / h),
            "the right answer is paid, too: it is the difference of the two rewards that counts.",
        ),
    ],
)


def _number(completion: str):
    """The completion read as a number, as a lenient grader would."""
    try:
        return int(completion.removesuffix(";"))
    except ValueError:
        return None


check_grader = Exercise(
    right=exact_grader,
    inputs=[
        ("72;", "72"), ("70,71,72,73;", "72"), ("72,73;", "72"), ("71,72;", "72"), ("72,72;", "72"), ("172;", "72"),
        ("720;", "72"), ("072;", "72"), ("+72;", "72"), ("72", "72"), ("72,", "72"), (",72;", "72"), ("72+;", "72"),
        ("24+48=72;", "72"), ("7;", "72"), (";", "72"), ("", "72"), ("104;", "104"), ("10,4;", "104"), ("104,", "104"),
    ],
    mistakes=[
        Mistake(sloppy_grader, "this still pays for 70,71,72,73; when the answer is 72. One guess, not any of several."),
        Mistake(
            lambda completion, answer: float(answer in completion),
            "you look for the answer anywhere in the text. Then 172; and 70,71,72,73; are paid.",
        ),
        Mistake(
            lambda completion, answer: float(completion.startswith(answer)),
            "you look at the beginning only. Then 720; and 72,73; are paid.",
        ),
        Mistake(
            lambda completion, answer: float(completion.endswith(f"{answer};")),
            "you look at the end only. Then 172; and 71,72; are paid.",
        ),
        Mistake(
            lambda completion, answer: float(completion.removesuffix(";").split(",")[0] == answer),
            "the first guess alone counts: a good idea, but what stands behind it is for free, and so is a missing EOS.",
        ),
        Mistake(
            lambda completion, answer: float(completion.endswith(";") and completion[:-1].split(",")[0] == answer),
            "the first guess alone counts, and what stands behind it is for free: 72,73; is paid.",
        ),
        Mistake(
            lambda completion, answer: float(completion.removesuffix(";") == answer),
            "a completion without its EOS is paid. It was cut off: nobody knows what would have come.",
        ),
        Mistake(
            lambda completion, answer: float(_number(completion) == int(answer)),
            "you compare numbers, not texts: 072; and +72; are paid, and a completion without its EOS.",
        ),
        Mistake(
            lambda completion, answer: float(completion.endswith(";") and _number(completion) == int(answer)),
            "you compare numbers, not texts. Then 072; and +72; are paid, and the policy may learn to write them.",
        ),
        Mistake(
            lambda completion, answer: float(set(completion.removesuffix(";").split(",")) == {answer}),
            "you collect the guesses in a set. Then 72,72; is paid, and a completion without its EOS.",
        ),
        Mistake(
            lambda completion, answer: float(completion == answer),
            "you forgot that a completion includes its EOS: the right one is 72; and not 72.",
        ),
        Mistake(lambda completion, answer: 0.0, "it cannot be gamed, but it never pays either: 72; is right."),
    ],
)  # fmt: skip
