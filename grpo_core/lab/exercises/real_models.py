"""Exercises of notebook 09: positions behind padding, a mean over several processes, a reader of final answers, memory.

What a network does with the position of padding is never seen, so positions are compared at real tokens only. A reader may
return None, which other checks take for a missing return: what it makes of several texts is compared at once.
"""

import re
from numbers import Real

import torch

from grpo_core.lab.checks import Exercise, Mistake, Probed
from grpo_core.rollout import positions


def at_real_tokens(function, mask):
    """The positions of real tokens, whatever stands at padding."""
    found = function(mask.clone())
    try:
        found = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        return found
    return found[mask] if found.shape == mask.shape else found


def _left_padded(*lengths: int) -> torch.Tensor:
    longest = max(lengths)
    return torch.tensor([[t >= longest - length for t in range(longest)] for length in lengths])


def _row(mask) -> torch.Tensor:
    return torch.arange(mask.shape[1])


check_positions = Probed(
    probe=at_real_tokens,
    right=positions,
    inputs=[(_left_padded(5, 2, 3),), (_left_padded(1, 4),), (_left_padded(3, 6, 4, 6),)],
    otherwise="a position is wrong, or the shape is not the mask's. Print the result for [[False, False, True, True, True]].",
    mistakes=[
        Mistake(
            lambda mask: _row(mask).expand(mask.shape),
            "you count the padding, too: a row's first real token must have position 0, however much stands before it.",
        ),
        Mistake(
            lambda mask: mask.long().cumsum(dim=1),
            "the first real token has position 1. Positions start at 0, as the model was trained.",
        ),
        Mistake(
            lambda mask: mask.long().cumsum(dim=0) - 1,
            "you add up over the rows of the batch. Along a row it is dim=1 (or −1).",
        ),
        Mistake(
            lambda mask: _row(mask) - (~mask[0]).sum() + torch.zeros_like(mask, dtype=torch.long),
            "you take the padding of the first row for all rows.",
        ),
        Mistake(
            lambda mask: _row(mask).flip(0).expand(mask.shape),
            "you count from the end: the last token of each row has position 0.",
        ),
        Mistake(
            lambda mask: _row(mask) + (~mask).sum(dim=1, keepdim=True),
            "you add the amount of padding. A token moved to the right by padding must be counted back: subtract it.",
        ),
        Mistake(
            lambda mask: mask.long().sum(dim=1, keepdim=True).expand(mask.shape) - 1,
            "each token of a row has the position of the last one: a running sum is wanted, cumsum, and not the sum.",
        ),
    ],
)


check_combined_mean = Exercise(
    right=lambda sums, tokens: sums.sum() / tokens.sum(),
    inputs=[
        (torch.tensor([4.0, 5.0]), torch.tensor([4, 1])),
        (torch.tensor([-3.0, 0.5, 8.0]), torch.tensor([10, 2, 30])),
        (torch.tensor([6.0, 0.0]), torch.tensor([12, 0])),
    ],
    mistakes=[
        Mistake(
            lambda sums, tokens: (sums / tokens).mean(),
            "this is the mean of the means. A token of the process with few tokens counts for more than one of the others.",
        ),
        Mistake(
            lambda sums, tokens: (sums / tokens.clamp(min=1)).mean(),
            "this is the mean of the means. A token of the process with few tokens counts for more than one of the others, and "
            "a process with nothing to train on counts as a 0.",
        ),
        Mistake(lambda sums, tokens: (sums / tokens).sum(), "you add up the means of the processes."),
        Mistake(lambda sums, tokens: sums.sum(), "this is the sum over all tokens: divide by how many there are."),
        Mistake(
            lambda sums, tokens: sums.mean(),
            "you divide by the number of processes. Divide by the number of tokens, of all of them together.",
        ),
        Mistake(
            lambda sums, tokens: sums.sum() / tokens.max() / len(tokens),
            "you divide as if each process had as many tokens as the largest one: padding would count.",
        ),
        Mistake(
            lambda sums, tokens: (sums * tokens).sum() / tokens.sum(),
            "each sum is weighted by its tokens once more. It is the means that would need weights; sums already have them.",
        ),
        Mistake(lambda sums, tokens: tokens.sum() / sums.sum(), "the fraction is upside down."),
    ],
)


NUMBER = r"-?[\d,]*\.?\d+"
NONE, A_NUMBER, A_TEXT, AN_ERROR = range(4)


def what_is_read(reader, texts):
    """(texts, 2): the kind of what the reader returns for each text, and its value; None if it returns nothing at all."""
    found = [_outcome(reader, text) for text in texts]
    if any(kind is None for kind, _ in found):
        return [value for _, value in found]
    return None if all(kind == NONE for kind, _ in found) else torch.tensor(found, dtype=torch.float64)


def _outcome(reader, text: str) -> tuple:
    """Kind and value. An error is shown to the reader, unless there is nothing in the text to read: that is a mistake of its
    own."""
    try:
        result = reader(text)
    except Exception:
        if final_answer(text) is not None:
            raise
        return AN_ERROR, 0.0
    if result is None or result is ...:
        return NONE, 0.0
    if isinstance(result, str) and re.fullmatch(NUMBER, result.strip()):
        return A_TEXT, float(result.replace(",", ""))
    return (A_NUMBER, float(result)) if isinstance(result, Real) else (None, result)


def _last(pattern: str, text: str):
    found = re.findall(pattern, text)
    return found[-1] if found else None


def _as_number(found: str | None):
    return None if found is None else float(found.replace(",", ""))


def final_answer(text: str) -> float | None:
    """The number behind the last ####."""
    return _as_number(_last(rf"####\s*({NUMBER})", text))


check_final_answer = Probed(
    probe=what_is_read,
    right=final_answer,
    inputs=[
        (("24 + 48 = 72\n#### 72", "48 / 2 = 24\n24 + 48 = 72"),),
        (("1,000 + 234 = 1,234\n#### 1,234", "There are 12 eggs.", "#### 1,000,000"),),
        (("5 - 10 = -5\n#### -5", "2 * 0.5 = 1.0, half of it is 0.5\n#### 0.5"),),
        (("#### 71\nNo, 24 + 48 is more.\n#### 72", "no idea", "#### 0"),),
    ],
    otherwise="some ending is read wrongly. Try '#### 1,234', '#### -5', '#### 0.5' and a text without #### yourself.",
    mistakes=[
        Mistake(
            lambda text: _as_number((re.findall(NUMBER, text) or [None])[0]),
            "you take the first number of the text. It belongs to the way, not to the answer.",
        ),
        Mistake(
            lambda text: _as_number(_last(NUMBER, text)),
            "you take the last number of the text, also where there is no ####: then a text that was cut off has an answer.",
        ),
        Mistake(
            lambda text: _last(rf"####\s*({NUMBER})", text),
            "you return text. Then '1,234' and '1234' are two answers: remove the commas, and make it a number.",
        ),
        Mistake(
            lambda text: _as_number(_last(r"####\s*(-?\d+(?:\.\d+)?)", text)),
            "1,234 is read as 1: the comma is a part of the number. Let the pattern take it, and remove it afterwards.",
        ),
        Mistake(
            lambda text: _as_number(_last(r"####\D*([\d,]*\.?\d+)", text)),
            "the minus sign is lost: −5 is read as 5.",
        ),
        Mistake(
            lambda text: _as_number(_last(r"####\s*(-?[\d,]+)", text)),
            "the decimals are lost: 0.5 is read as 0.",
        ),
        Mistake(
            lambda text: _as_number((re.findall(rf"####\s*({NUMBER})", text) or [None])[0]),
            "where there are two ####, you take the first. The last word counts.",
        ),
        Mistake(
            lambda text: float(text.split("####")[-1].replace(",", "")),
            "a text without an answer makes your code fail: return None there, or one such completion ends the training.",
        ),
        Mistake(
            lambda text: final_answer(text) or 0.0,
            "where there is no answer you return 0. Some answers are 0: return None.",
        ),
        Mistake(
            lambda text: final_answer(text) or None,
            "the answer 0 is lost: in Python, 0 counts as false. Ask whether something was found, not whether it is true.",
        ),
    ],
)


check_memory = Exercise(
    right=lambda parameters, critic, leash: (16 * (1 + critic) + 2 * leash) * parameters / 1e9,
    inputs=[(7e9, True, True), (7e9, False, True), (0.5e9, True, False), (72e9, False, False)],
    mistakes=[
        Mistake(
            lambda parameters, critic, leash: (16 * (1 + critic) + 2 * leash) * parameters,
            "these are bytes. A gigabyte is 1e9 of them.",
        ),
        Mistake(
            lambda parameters, critic, leash: (16 * (1 + critic) + 2 * leash) * parameters / 2**30,
            "you divide by 2**30: that is a gibibyte. A gigabyte is 1e9 bytes.",
        ),
        Mistake(
            lambda parameters, critic, leash: (16 + 2 * critic + 2 * leash) * parameters / 1e9,
            "a critic is trained as well: it needs gradients and an optimizer, 16 bytes a parameter.",
        ),
        Mistake(
            lambda parameters, critic, leash: (16 + 2 * leash) * parameters / 1e9,
            "the critic is missing: another network as large as the policy, and trained.",
        ),
        Mistake(
            lambda parameters, critic, leash: 16 * (1 + critic + leash) * parameters / 1e9,
            "the reference is frozen: no gradients, no optimizer, 2 bytes a parameter.",
        ),
        Mistake(
            lambda parameters, critic, leash: (16 * (1 + critic) + 2) * parameters / 1e9,
            "without a leash there is no reference to hold.",
        ),
        Mistake(
            lambda parameters, critic, leash: 16 * (1 + critic) * parameters / 1e9,
            "with a leash the reference must be held, too: 2 bytes a parameter.",
        ),
        Mistake(
            lambda parameters, critic, leash: 2 * (1 + critic + leash) * parameters / 1e9,
            "these are the weights alone. What is trained needs 16 bytes a parameter: gradients and Adam, too.",
        ),
        Mistake(
            lambda parameters, critic, leash: (16 + 16 * critic + 2 * leash * (1 + critic)) * parameters / 1e9,
            "there is one reference: the policy's. A critic has none.",
        ),
    ],
)
