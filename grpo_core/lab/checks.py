"""The engine of the exercise checks: hidden inputs, and a wrong version of the answer for each likely mistake.

A mistake is recognized by what it computes: if the reader's function agrees with a wrong version on every hidden input,
that is what the reader wrote, and the message can say so.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mistake:
    """A wrong version of an exercise's function, and what to tell the reader who wrote it."""

    wrong: Callable
    message: str


@dataclass(frozen=True)
class Exercise:
    """A function that the reader writes. Call it with the reader's attempt; it returns the verdict as text.

    Attributes:
        right: the function as it should be.
        inputs: the arguments of the hidden calls.
        mistakes: tried in turn, once the attempt is known to be wrong.

    >>> double = Exercise(lambda x: 2 * x, [(1.0,), (3.0,)], [Mistake(lambda x: x * x, "you squared it.")])
    >>> double(lambda x: x + x)
    'Right, on 2 hidden inputs.'
    >>> double(lambda x: x**2)
    'Not quite: you squared it.'
    >>> double(lambda x: ...)
    'Not yet: replace the ... by your code.'
    """

    right: Callable
    inputs: Sequence[tuple]
    mistakes: Sequence[Mistake]

    def __call__(self, attempt: Callable) -> str:
        try:
            results = [attempt(*copy.deepcopy(arguments)) for arguments in self.inputs]
        except Exception as error:  # Whatever a reader's code raises is shown, and the notebook runs on.
            return f"Not quite: your code raised {type(error).__name__}: {error}"
        if any(result is None or result is ... for result in results):
            return "Not yet: replace the ... by your code."
        if _agree(results, self.right, self.inputs):
            return f"Right, on {len(self.inputs)} hidden inputs."
        for mistake in self.mistakes:
            if _agree(results, mistake.wrong, self.inputs):
                return f"Not quite: {mistake.message}"
        return f"Not quite: {_first_difference(results, self.right, self.inputs)}"


def _agree(results: list, function: Callable, inputs: Sequence[tuple]) -> bool:
    return all(_same(result, function(*arguments)) for result, arguments in zip(results, inputs))


def _same(result, expected) -> bool:
    try:
        result, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (result, expected))
    except (TypeError, ValueError, RuntimeError):
        return False
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


def _first_difference(results: list, right: Callable, inputs: Sequence[tuple]) -> str:
    for result, arguments in zip(results, inputs):
        expected = right(*arguments)
        if not _same(result, expected):
            given = ", ".join(_show(argument) for argument in arguments)
            return f"for {given} you return {_show(result)}; {_show(expected)} is right."
    raise AssertionError("the results agree")


def _show(value) -> str:
    if isinstance(value, Tensor):
        return str(torch.round(value.detach().double(), decimals=4).tolist())
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
