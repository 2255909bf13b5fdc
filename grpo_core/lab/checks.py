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
    'Not yet: replace the ... by your code, and return the result.'
    """

    right: Callable
    inputs: Sequence[tuple]
    mistakes: Sequence[Mistake]

    def __call__(self, attempt: Callable) -> str:
        try:
            results = [attempt(*copy.deepcopy(arguments)) for arguments in self.inputs]
        except Exception as error:  # Whatever a reader's code raises is shown, and the notebook runs on.
            return f"Not quite: your code raised {type(error).__name__}: {error}"
        missing = [result is None or result is ... for result in results]
        if all(missing):
            return "Not yet: replace the ... by your code, and return the result."
        if any(missing):
            return "Not quite: your function returns nothing for some inputs. Is a return missing?"
        if _agree(results, self.right, self.inputs):
            return f"Right, on {len(self.inputs)} hidden inputs."
        for mistake in self.mistakes:
            if _agree(results, mistake.wrong, self.inputs):
                return f"Not quite: {mistake.message}"
        return f"Not quite: {_first_difference(results, self.right, self.inputs)}"


def value_and_gradient(function: Callable, log_probs: Tensor, *others):
    """A probe for losses: value and slope by log_probs. A loss with the right value and no gradient trains nothing."""
    log_probs = log_probs.clone().requires_grad_()
    value = function(log_probs, *others)
    if not isinstance(value, Tensor):
        return value
    return torch.cat([value.detach().flatten(), slope(value, log_probs).flatten()])


def slope(value: Tensor, of: Tensor) -> Tensor:
    """The derivative of the sum; 0 where the reader cut the value off from the graph."""
    if not value.requires_grad:
        return torch.zeros_like(of)
    (gradient,) = torch.autograd.grad(value.sum(), of, allow_unused=True)
    return torch.zeros_like(of) if gradient is None else gradient


@dataclass(frozen=True)
class Probed(Exercise):
    """An exercise that compares what `probe` makes of a function, not what the function returns.

    Attributes:
        probe: called with the function and the arguments of a hidden call.
        otherwise: what to say of a mistake that is not listed.
    """

    probe: Callable
    otherwise: str

    def __call__(self, attempt) -> str:
        plain = Exercise(
            self._probed(self.right), self.inputs, [Mistake(self._probed(m.wrong), m.message) for m in self.mistakes]
        )
        verdict = plain(self._probed(attempt))
        return f"Not quite: {self.otherwise}" if verdict.startswith("Not quite: for ") else verdict

    def _probed(self, function):
        return lambda *arguments: self.probe(function, *arguments)


def no_gradient(right: Callable) -> Mistake:
    """The mistake of cutting a loss off from what it should train."""
    return Mistake(
        lambda log_probs, *others: right(log_probs.detach(), *others),
        "the values are right, but no gradient reaches log_probs: leave out detach, no_grad and item.",
    )


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
