"""The engine of the exercise checks."""

import pytest
import torch

from grpo_core.lab.checks import Exercise, Mistake

MEAN = Exercise(
    right=lambda x: x.mean(1),
    inputs=[(torch.tensor([[1.0, 2.0, 6.0]]),), (torch.tensor([[0.0, 0.0], [1.0, 3.0]]),)],
    mistakes=[
        Mistake(lambda x: x.sum(1), "that is the sum."),
        Mistake(lambda x: x.mean(0), "that is the mean of the columns."),
        Mistake(lambda x: x.mean(1) / 0, "you divided by zero."),
    ],
)


@pytest.mark.parametrize(
    ("attempt", "verdict"),
    [
        (lambda x: x.mean(dim=1), "Right, on 2 hidden inputs."),
        (lambda x: x.mean(dim=1).tolist(), "Right, on 2 hidden inputs."),
        (lambda x: x.mean(dim=1).double().requires_grad_(), "Right, on 2 hidden inputs."),
        (lambda x: x.sum(1), "Not quite: that is the sum."),
        (lambda x: x.mean(0), "Not quite: that is the mean of the columns."),
        (lambda x: x.mean(1) / 0, "Not quite: you divided by zero."),
        (lambda x: ..., "Not yet: replace the ... by your code, and return the result."),
        (lambda x: None, "Not yet: replace the ... by your code, and return the result."),
    ],
)
def test_verdict(attempt, verdict):
    assert MEAN(attempt) == verdict


def test_the_first_difference_may_be_on_a_later_input():
    verdict = MEAN(lambda x: x.amax(1) / 2)  # 6 / 2 is the mean of 1, 2, 6 by chance.
    assert verdict == "Not quite: for [[0.0, 0.0], [1.0, 3.0]] you return [0.0, 1.5]; [0.0, 2.0] is right."


def test_the_right_numbers_in_the_wrong_shape_are_not_right():
    assert MEAN(lambda x: x.mean(1, keepdim=True)).startswith("Not quite")
    assert MEAN(lambda x: x.mean(1)[:1]).startswith("Not quite")
    zeros = Exercise(lambda n: torch.zeros(n), [(3,)], [])  # Here they would agree if they were broadcast.
    assert zeros(lambda n: [0.0] * n).startswith("Right")
    assert zeros(lambda n: 0.0).startswith("Not quite")
    assert zeros(lambda n: torch.zeros(n, 1)).startswith("Not quite")


def test_a_mistake_must_show_on_every_input():
    """Right here and wrong there is not that mistake."""
    assert "sum" not in MEAN(lambda x: x.sum(1) if len(x) == 1 else x.mean(1))


@pytest.mark.parametrize("error", [ValueError("x"), ZeroDivisionError(), NotImplementedError(), AssertionError("no")])
def test_an_exception_is_reported(error):
    def attempt(x):
        raise error

    assert MEAN(attempt) == f"Not quite: your code raised {type(error).__name__}: {error}"


@pytest.mark.parametrize("attempt", [None, 3, lambda: 1, lambda x, y: 1])
def test_what_cannot_be_called_with_the_input_is_reported(attempt):
    assert MEAN(attempt).startswith("Not quite: your code raised TypeError")


def test_nan_is_not_right_unless_it_is():
    assert MEAN(lambda x: x.mean(1) * float("nan")).startswith("Not quite")
    undefined = Exercise(lambda x: float("nan"), [(1.0,)], [])
    assert undefined(lambda x: float("nan")).startswith("Right")
    assert undefined(lambda x: 1.0).startswith("Not quite")


def test_work_in_place_does_not_spoil_the_inputs():
    assert MEAN(lambda x: x.mul_(0).mean(1)).startswith("Not quite")
    assert MEAN(lambda x: x.mean(1)).startswith("Right")
