"""The pictures of notebook 08: what is paid beside what is true, over iterations and over the distance from the start."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd

from grpo_core.lab.panel import BLUE, GRAY, ORANGE
from grpo_core.studies.no_leash import draw_goodhart

LOOKS = {0.0: (ORANGE, "s--"), 0.08: (GRAY, "^:"), 0.3: (BLUE, "o-")}


def plot_rewards(seen: Sequence[float], true: Sequence[float] | None = None) -> None:
    """Mean reward of each iteration's samples: what the grader pays, and, once it is known, what is true."""
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    iterations = range(1, len(seen) + 1)
    axes.plot(iterations, seen, "o-", color=BLUE, markersize=4, label="what the grader pays")
    if true is not None:
        axes.plot(iterations, true, "s--", color=ORANGE, markersize=4, label="what is true")
        axes.legend(frameon=False)
    _finish(axes, xlabel="iteration", ylabel="mean reward", ylim=(0, 1))


def plot_goodhart(history: pd.DataFrame) -> None:
    """Both rewards against the distance from the start policy, a line for each leash."""
    _, axes = plt.subplots(figsize=(7.2, 4.0))
    draw_goodhart(axes, history)
    plt.show()


def plot_closed_form(curve: pd.DataFrame, trained: pd.DataFrame, crossing: float) -> None:
    """The best policies under leashes of all strengths as lines, trained ones as marks; left over beta, right over KL."""
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axes, column in ((left, "beta"), (right, "kl")):
        for reward, color, line, marker in (("seen", BLUE, "-", "o"), ("true", ORANGE, "--", "s")):
            axes.plot(curve[column], curve[reward], line, color=color, label=f"{reward}: formula")
            axes.plot(trained[column], trained[reward], marker, color=color, label=f"{reward}: trained")
    left.axvline(crossing, color="black", linewidth=0.6)
    left.invert_xaxis()
    left.legend(frameon=False, fontsize=8, loc="upper left")
    left.set_xscale("log")
    left.set_xticks([1, 0.3, 0.1, 0.05], ["1", "0.3", "0.1", "0.05"])
    _finish(left, xlabel="beta (the leash gets looser to the right)", ylabel="mean reward", ylim=(0, 1.6))
    _finish(right, xlabel="KL(policy ‖ reference), nats")


def plot_reward_model(frame: pd.DataFrame) -> None:
    """PPO against a learned reward: its score, and true greedy accuracy, over iterations. Mean and range of the seeds."""
    _, panels = plt.subplots(1, 2, figsize=(9, 3))
    _bands(panels, frame, {"score": "score of the reward model", "accuracy": "greedy accuracy, truly right"})


def plot_recovery(frame: pd.DataFrame, bad: int) -> None:
    """A run with one bad update: true greedy accuracy, and the distance. Mean and range of the seeds."""
    _, panels = plt.subplots(1, 2, figsize=(9, 3))
    for axes in panels:
        axes.axvline(bad, color="black", linewidth=0.6)
    _bands(panels, frame, {"greedy": "greedy accuracy", "kl": "KL to the start, nats per completion"})


def _bands(panels, frame: pd.DataFrame, columns: dict[str, str]) -> None:
    for axes, (column, title) in zip(panels, columns.items()):
        for beta, rows in frame.dropna(subset=[column]).groupby("beta"):
            color, line = LOOKS[beta]
            over_seeds = rows.groupby("iteration")[column]
            low, high = over_seeds.min(), over_seeds.max()
            axes.fill_between(low.index, low, high, color=color, alpha=0.15, linewidth=0)
            axes.plot(over_seeds.mean(), line, color=color, markersize=4, markevery=5, label=f"beta {beta:g}")
        axes.set_title(title, fontsize=10)
        _finish(axes, show=False, xlabel="iteration")
    panels[0].legend(frameon=False, fontsize=8)
    plt.show()


def _finish(axes, show: bool = True, **settings) -> None:
    axes.set(**settings)
    axes.spines[["top", "right"]].set_visible(False)
    if show and axes is axes.figure.axes[-1]:
        plt.show()
