"""LiveRun: watch GRPO train. Curves and a sample group move while a worker thread does the work.

`Training` is one run that can be started, watched and stopped; `TrainingPanel` is a panel with Run, Stop and progress, and
the parent of `LiveRun`, `BetaLab` and `GraderLab`. The worker sets widget traits and nothing else, and not too often:
drawing takes its time from the training.
"""

import copy
import html
import threading
import time
from collections.abc import Callable

import ipywidgets as W
import torch
from matplotlib.ticker import MaxNLocator

from grpo_core.advantages import group_advantages
from grpo_core.config import GRPOConfig
from grpo_core.evaluate import Estimate
from grpo_core.grpo import train
from grpo_core.history import History, TrainingDiverged
from grpo_core.lab.group_stepper import Group, signed
from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, button, figure_html, table_html
from grpo_core.report import KL_BAND, REFERENCE
from grpo_core.rollout import Rollout, sample_groups
from grpo_core.task import Addition
from grpo_core.warm_start import warm_start

UPDATE_SECONDS = 0.2


class Training:
    """One run of `train`, by default from the start policy on sums.

    Args:
        config: settings of the run.
        policy: where it starts; it is copied.
        task: what is trained; it has an example.

    Attributes:
        config, policy, task: of the run; the policy changes while it trains.
        history: the rows so far, also while it runs and after a stop or a divergence.
        groups: for each row, a group of completions of the task's example by the policy of that moment.
        state: "waiting", "running", "finished", "stopped", "diverged" or "failed".
        problem: what went wrong, in words; empty if nothing did.
    """

    def __init__(self, config: GRPOConfig, policy=None, task=None):
        self.config, self.task = config, Addition() if task is None else task
        self.policy = warm_start() if policy is None else copy.deepcopy(policy)
        self._generator = torch.Generator().manual_seed(config.seed)  # Of its own, so that watching changes nothing.
        self.history, self.groups = History(), []
        self.state, self.problem = "waiting", ""
        self._stop, self._thread = threading.Event(), None

    def run(self, on_change: Callable[[], None] = lambda: None) -> "Training":
        """Train here and now. `on_change` is called after each iteration, and at the end."""
        self.state = "running"

        def record(row, rollout):
            self.record(row, rollout)
            on_change()

        try:
            train(self.task, self.policy, self.config, record, self._stop.is_set)
            self.state = "finished" if len(self.history.rows) > self.config.iterations else "stopped"
        except TrainingDiverged as error:
            self.state, self.problem = "diverged", str(error)
        except Exception as error:  # On a worker thread nobody would see it: the panel has to say it.
            self.state, self.problem = "failed", f"{type(error).__name__}: {error}"
        on_change()
        return self

    def record(self, row: dict, rollout: Rollout | None) -> None:
        """Keep the row of an iteration, and a group for the example."""
        self.history.rows.append(row)
        if row["iteration"] != 1:  # The first batch holds the example: there, show the group that was trained on.
            size, temperature = self.config.group_size, self.config.temperature
            rollout = sample_groups(self.policy, self.task, [self.task.example], size, temperature, generator=self._generator)
        self.groups.append(Group.of(rollout))

    def start(self, on_change: Callable[[], None]) -> None:
        """Train on a worker thread."""
        self.state = "running"
        self._thread = threading.Thread(target=self.run, args=(on_change,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end before the next iteration."""
        self._stop.set()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    @property
    def iteration(self) -> int:
        return self.history.rows[-1]["iteration"] if self.history.rows else 0

    @property
    def seconds(self) -> float:
        """Time spent on training and measuring, without the drawing."""
        return sum(row["seconds"] for row in self.history.rows)

    def latest(self, column: str) -> float | None:
        """The last measured value of a column; None before the first."""
        values = [row[column] for row in self.history.rows if column in row]
        return values[-1] if values else None

    @property
    def accuracy(self) -> Estimate | None:
        """The last measured greedy accuracy with its interval."""
        values = [self.latest(f"accuracy{end}") for end in ("", "_low", "_high")]
        return None if values[0] is None else Estimate(*values)

    @property
    def status(self) -> str:
        """The state in words, with the reason where there is one."""
        problem = f": {self.problem}" if self.problem else ""
        return f"{self.state} at iteration {self.iteration} of {self.config.iterations}{problem}"


class TrainingPanel(Panel):
    """Run, Stop, a progress bar with its text, and one training at a time. A subclass gives `make` and the views."""

    training: Training | None = None  # Here already: a panel that is refused while it is made is closed, too.

    def __init__(self, buttons: list[W.Widget], rows: list[list[W.Widget]], height: int):
        self._lock, self._gone, self._next_update = threading.RLock(), False, 0.0
        self.run_button = button("Run", self.run, "train the start policy")
        self.stop_button = button("Stop", self.stop, "end the run before its next iteration")
        self.progress = W.IntProgress(value=0, min=0, max=1, layout=W.Layout(width="200px"))
        self.progress_text = W.Label()
        super().__init__([[self.run_button, self.stop_button, *buttons, self.progress, self.progress_text], *rows], height)

    def make(self) -> Training:
        """A new training with the present settings; a ValueError, which the view then explains, if they are impossible."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        return self.training is not None and self.training.state == "running"

    def run(self) -> None:
        """Start a run, unless one is under way: a double click starts one, not two."""
        with self._lock:
            if self.busy or self._gone:
                return
            try:
                self.training = self.make()
            except ValueError:
                self.refresh()
                return
            self.training.start(self._changed)
            self.refresh()

    def stop(self) -> None:
        if self.training is not None:
            self.training.stop()

    def result(self) -> Training:
        """The whole run. Waits for the one that Run started; if there is none, or it was stopped, trains here and now."""
        if self.busy:
            self.training.wait()
        if self.training is None or self.training.state == "stopped":
            self.training = self.make()
            self.training.run(self._changed)
        return self.training

    def _changed(self) -> None:
        """Called by the worker after each iteration: show it, if the last time is long enough ago."""
        start = time.monotonic()
        if not self.busy or start >= self._next_update:
            self.refresh()
            drawing = time.monotonic() - start
            self._next_update = start + max(UPDATE_SECONDS, 5 * drawing)

    def refresh(self, *_) -> None:
        """One thread at a time, so that the last one to write shows the present state."""
        with self._lock:
            if self._gone:
                return
            self.run_button.disabled, self.stop_button.disabled = self.busy, not self.busy
            if self.training is not None:
                self.progress.max = self.training.config.iterations
                self.progress.value = self.training.iteration
            self.progress_text.value = self.training.status.partition(":")[0] if self.training else "press Run"
            super().refresh()

    def close(self) -> None:
        """A panel that is gone must not keep training."""
        self.stop()
        self._gone = True
        super().close()


class LiveRun(TrainingPanel):
    """One run, live: accuracy, KL, and what the policy answers to the task's example.

    Args:
        config: settings of the run; the defaults of GRPO by default.
        guess: your prediction of the final accuracy, drawn as a line.
    """

    def __init__(self, config: GRPOConfig = GRPOConfig(), guess: float | None = None):
        self.config, self.guess = config, guess
        super().__init__([], [], height=480)

    def make(self) -> Training:
        return Training(self.config)

    def view(self) -> str:
        return f"<p>{self._story()}</p>{self._picture()}{self._group()}"

    def _story(self) -> str:
        config, training = self.config, self.training
        problem = f" <b>{html.escape(training.problem)}</b>" if training and training.problem else ""
        if training is None or not training.history.rows:
            return (
                f"{config.iterations} iterations of {config.prompts_per_iteration} prompts × {config.group_size} completions. "
                "Press <b>Run</b> to train the start policy and watch; <b>Stop</b> ends it early. It takes a few seconds."
            ) + problem
        kl, reward = training.latest("kl"), training.latest("reward")
        sampled = "" if kl is None else f" Mean reward of the samples {reward:.3f}, KL {kl:.3f}."
        return f"Iteration {training.iteration}: greedy accuracy <b>{training.accuracy}</b>.{sampled}{problem}"

    def _picture(self) -> str:
        rows = self.training.history.rows if self.training else []

        def draw(figure):
            left, right = figure.subplots(1, 2)
            draw_accuracy(left, self.config.iterations)
            left.plot(list(REFERENCE), list(REFERENCE.values()), "s--", color=ORANGE, markersize=4, label="reference run")
            if self.guess is not None:
                left.axhline(self.guess, color=GRAY, linestyle=":", label="your guess")
            band = [(row["iteration"], row["accuracy_low"], row["accuracy_high"]) for row in rows if "accuracy" in row]
            if band:
                left.fill_between(*zip(*band), color=BLUE, alpha=0.2, linewidth=0)
                left.plot(*curve(rows, "accuracy"), "o-", color=BLUE, markersize=3, label="this run, 95 % band")
            left.legend(loc="lower right", frameon=False, fontsize=8)
            draw_kl(right, self.config.iterations, max((row.get("kl", 0.0) for row in rows), default=0.0))
            right.plot(*curve(rows, "kl"), "o-", color=BLUE, markersize=3)

        measured = "no run yet" if not rows else f"after iteration {self.training.iteration} {self.training.accuracy}"
        reference = f"reference run from {REFERENCE[0]} to {REFERENCE[20]}"
        alt = f"Left: greedy accuracy over iterations, {measured}; {reference}. Right: KL to the start policy."
        return figure_html(draw, alt, size=(8.6, 2.8))

    def _group(self) -> str:
        if self.training is None or not self.training.groups:
            return ""
        return f"<p>What it answers now:</p>{group_table(self.training.groups[-1])}"


def group_table(group: Group) -> str:
    """A group as in the worked example: completions across, rewards and advantages below."""
    advantages = group_advantages(torch.tensor([group.rewards]))[0].tolist()
    rows = [
        ["reward", *(f"{reward:g}" for reward in group.rewards)],
        ["advantage", *(signed(advantage) for advantage in advantages)],
    ]
    return table_html([group.prompt, *group.texts], rows)


def curve(rows: list[dict], column: str) -> tuple[list, list]:
    """Iterations and values where the column was measured."""
    points = [(row["iteration"], row[column]) for row in rows if column in row]
    return [x for x, _ in points], [y for _, y in points]


def draw_accuracy(axes, iterations: int) -> None:
    """An empty picture of accuracy over iterations, with axes that do not move."""
    axes.set(title="greedy accuracy", xlabel="iteration", xlim=(-0.5, 1.06 * iterations), ylim=(0, 1))
    _plain(axes)


def draw_kl(axes, iterations: int, highest: float = 0.0) -> None:
    """An empty picture of KL over iterations, up to the highest value or 1, with the band of a healthy run."""
    axes.axhspan(*KL_BAND, color=GRAY, alpha=0.15, linewidth=0)
    top = min(1.0, max(0.5, 1.1 * highest))  # Beyond 1 a run is lost; the others must stay readable.
    axes.set(title="KL to the start (nats per token)", xlabel="iteration", xlim=(-0.5, 1.06 * iterations), ylim=(0, top))
    _plain(axes)


def _plain(axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
