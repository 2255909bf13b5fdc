"""GraderLab: train against a grader of your own, and watch what it pays drift away from what is true.

A grader is any Python function of a completion and the true answer. It may raise, return nonsense or, as a rule, loop for ever:
then the run ends and says so, with the completion that did it. Left out: a sandbox; the code is the reader's own.
"""

import copy
import html
import reprlib
import sys
import time
from collections.abc import Callable

from grpo_core.config import GRPOConfig
from grpo_core.lab.goodhart_explorer import LOOKS, both_verdicts
from grpo_core.lab.live_run import Training, TrainingPanel, curve, draw_accuracy, draw_kl
from grpo_core.lab.panel import figure_html
from grpo_core.rollout import Rollout

MOST_SECONDS = 2.0  # For one call of a grader.
LARGEST = 1e6  # Of a reward, in size: float32 cannot hold the squares of far larger ones.


class GraderError(Exception):
    """What the reader's grader did wrong, and on which completion."""


class GraderTraining(Training):
    """A run that is paid by the reader's grader and measured by the truth.

    Each row has one more column, `true`: the mean true reward of the samples whose mean pay is `reward`.
    """

    def __init__(self, config: GRPOConfig, policy, task, grader: Callable[[str, str], float]):
        super().__init__(config, policy, paid_by(self.unless_stopped(checked(grader)), task))

    def unless_stopped(self, grader: Callable[[str, str], float]) -> Callable[[str, str], float]:
        """A slow grader must not keep Stop waiting for hundreds of calls. `train` takes the interrupt as a stop."""

        def pay(completion: str, answer: str) -> float:
            if self._stop.is_set():
                raise KeyboardInterrupt
            return grader(completion, answer)

        return pay

    def record(self, row: dict, rollout: Rollout | None) -> None:
        if rollout is not None:
            answers = [problem.answer for problem in rollout.problems for _ in range(rollout.group_size)]
            row["true"] = sum(map(self.task.true_reward, rollout.texts, answers)) / len(answers)
        super().record(row, rollout)


class GraderLab(TrainingPanel):
    """Run and Stop; below them both rewards, the KL, and what the policy answers to the task's example.

    Args:
        grader: called with a completion and the true answer; returns the reward, any finite number.
        task_of: makes the task that a grader pays for. It has a `true_reward`, which takes what a grader takes.
        start: the policy that each run starts from; it is never changed.
        config: settings of a run.

    Raises:
        ValueError: the grader is not a function.
    """

    _latest: "GraderLab | None" = None

    def __init__(self, grader: Callable[[str, str], float], task_of: Callable, start, config: GRPOConfig = GRPOConfig()):
        if not callable(grader):
            raise ValueError(f"grader must be a function of a completion and the true answer, got {grader!r}")
        if GraderLab._latest is not None:
            GraderLab._latest.stop()  # Two runs at once would each take twice as long, and only one is looked at.
        GraderLab._latest = self
        self.grader, self.task_of, self.start, self.config = grader, task_of, start, config
        super().__init__([], [], height=570)

    def make(self) -> GraderTraining:
        return GraderTraining(self.config, self.start, self.task_of(self.grader), self.grader)

    def view(self) -> str:
        problem = self.training.problem if self.training else ""
        said = f"<p><b>{html.escape(problem)}</b></p>" if problem else ""
        return f"<p>{self._story()}</p>{said}{self._picture()}{self._group()}"

    def _story(self) -> str:
        config, training = self.config, self.training
        if training is None or not training.history.rows:
            return (
                f"{config.iterations} iterations of {config.prompts_per_iteration} prompts × {config.group_size} completions, "
                f"beta {config.beta:g}. Press <b>Run</b> to train against your grader; <b>Stop</b> ends it early."
            )
        paid, true = training.latest("reward"), training.latest("true")
        samples = "" if paid is None else f" Your grader pays {number(paid)} a sample; {true:.2f} of them are truly right."
        return f"Iteration {training.iteration}: greedy accuracy <b>{training.accuracy}</b>, judged by the truth.{samples}"

    def _picture(self) -> str:
        rows = self.training.history.rows if self.training else []

        def draw(figure):
            left, right = figure.subplots(1, 2)
            draw_rewards(left, rows, self.config.iterations)
            draw_kl(right, self.config.iterations, max((row.get("kl", 0.0) for row in rows), default=0.0))
            right.plot(*curve(rows, "kl"), "o-", color=LOOKS["seen"][0], markersize=3)

        paid, true = (curve(rows, column)[1] for column in ("reward", "true"))
        now = f"at the end {number(paid[-1])} is paid, and {true[-1]:.2f} are truly right" if paid else "no run yet"
        return figure_html(draw, f"Left: both rewards over iterations, {now}. Right: KL to the start policy.", size=(8.6, 2.8))

    def _group(self) -> str:
        if self.training is None or not self.training.groups:
            return ""
        group = self.training.groups[-1]
        true = [self.training.task.true_reward(text, group.answer) for text in group.texts]
        prompt, answer = html.escape(group.prompt), html.escape(group.answer)
        caption = f"<p>What it answers to <code>{prompt}</code> (true answer {answer}):</p>"
        return caption + both_verdicts(group.texts, group.rewards, true)


def draw_rewards(axes, rows: list[dict], iterations: int) -> None:
    """What the grader pays and what is true, over iterations. A grader may pay any number: the axis grows, if it must."""
    draw_accuracy(axes, iterations)
    for column, look in (("reward", "seen"), ("true", "true")):
        color, line, marker, label = LOOKS[look]
        axes.plot(*curve(rows, column), color=color, linestyle=line, marker=marker, markersize=3, label=label)
    paid = [0.0, 1.0, *curve(rows, "reward")[1]]
    room = 0.2 * (max(paid) - min(paid))  # For the legend.
    axes.set(title="mean reward of the samples", ylim=(min(paid), max(paid) + room))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


def number(value: float) -> str:
    """Two decimals, and a real minus.

    >>> number(0.5), number(-2.25)
    ('0.50', '−2.25')
    """
    return f"{value:.2f}".replace("-", "−")


def paid_by(grader: Callable[[str, str], float], task):
    """The task, paid by this grader; only its validation and held-out problems are marked by its true reward.

    They measure an accuracy, which is a share of right answers, and a grader may pay 5 or −1.
    """

    class Truth(str):
        """An answer that tells `verify` to mark by the truth."""

    def verify(completion: str, answer: str) -> float:
        return (task.true_reward if isinstance(answer, Truth) else grader)(completion, answer)

    paid = copy.copy(task)
    paid.verify = verify
    for part in ("validation", "held_out"):
        setattr(paid, part, [problem._replace(answer=Truth(problem.answer)) for problem in getattr(task, part)])
    return paid


def checked(grader: Callable[[str, str], float]) -> Callable[[str, str], float]:
    """The grader, but whatever goes wrong in it is a GraderError that says on which completion.

    >>> checked(lambda completion, answer: completion == answer + ";")("72;", "72")
    1.0
    >>> checked(lambda completion, answer: int(completion))("72;", "72")
    Traceback (most recent call last):
    grpo_core.lab.grader_lab.GraderError: your grader raised ValueError (invalid literal for int() with base 10: '72;') \
on the completion '72;' with the answer '72'
    """

    def pay(completion: str, answer: str) -> float:
        try:
            return as_reward(within(MOST_SECONDS, grader, completion, answer))
        except GraderError as error:
            problem = str(error)
        except KeyboardInterrupt:  # Ctrl-C: `train` takes it as a stop.
            raise
        except BaseException as error:  # On a worker thread, whatever else gets out would leave a run that never ends.
            problem = f"raised {type(error).__name__} ({str(error)[:200]})"
        raise GraderError(f"your grader {problem} on the completion {completion!r} with the answer {answer!r}")

    return pay


def as_reward(value) -> float:
    """What a grader returned, as a number; a GraderError says why it is none.

    >>> as_reward(True), as_reward(3)
    (1.0, 3.0)
    """
    if value is None:
        raise GraderError("returned nothing (is a return missing?)")
    try:
        reward = None if isinstance(value, str | bytes) else float(value)
    except Exception:  # Whatever the reader's object raises, it is not a number.
        reward = None
    if reward is None or not abs(reward) <= LARGEST:
        wanted = f"not a number between −{LARGEST:,.0f} and {LARGEST:,.0f}"
        raise GraderError(f"returned {reprlib.repr(value)}, {wanted},")
    return reward


class _TooLong(BaseException):
    """Not an Exception: a grader that catches those must not catch this."""


def within(seconds: float, function: Callable, *arguments):
    """Call a function, and break off where it loops for longer. Only Python code can be broken off.

    A long sleep, and code that catches everything, are found out when they come back.
    """
    end = time.monotonic() + seconds

    def trace(frame, event, argument):
        if time.monotonic() > end:
            raise _TooLong
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function(*arguments)
        if time.monotonic() > end:
            raise _TooLong
        return result
    except _TooLong:
        raise GraderError(f"ran for more than {seconds:g} seconds (does a loop never end?)") from None
    finally:
        sys.settrace(former)
