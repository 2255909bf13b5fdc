"""The pictures of notebook 07: a game, the curves of the recorded runs, and what a length limit does to two kinds of games."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd

from grpo_core.lab.panel import BLUE, GRAY, ORANGE
from grpo_core.shell_game import CUPS, SWAPS, follow
from grpo_core.studies.growing_reasoning import draw_by_swaps_left, draw_curves, draw_shares


def plot_game(prompt: str) -> None:
    """The cups as four lines from left to right that trade places at each swap; the one with the ball is thick."""
    _, axes = plt.subplots(figsize=(1.1 * len(prompt), 2.2))
    ball = prompt[0] + follow(prompt)
    for x, letter in enumerate(prompt[1:]):
        for cup in CUPS:
            here, there = int(cup), int(follow(cup + letter))
            color, width = (ORANGE, 4) if cup == ball[x] else (GRAY, 1)
            axes.plot([x, x + 0.25, x + 0.75, x + 1], [here, here, there, there], color=color, linewidth=width)
    axes.plot(range(len(ball)), [int(cup) for cup in ball], "o", color=ORANGE, markersize=9)
    axes.set_xticks([x + 0.5 for x in range(len(ball) - 1)], [f"{x}: {SWAPS[x][0]}↔{SWAPS[x][1]}" for x in prompt[1:]])
    axes.set_yticks([int(cup) for cup in CUPS], [f"cup {cup}" for cup in CUPS])
    axes.set(ylim=(4.4, 0.6), title=prompt)
    _finish(axes)


def plot_curves(history: pd.DataFrame, titles: Mapping[str, str], runs: list[str]) -> None:
    """One panel for each column in `titles`: the runs over the iterations, mean over seeds with its 95 % band."""
    _, panels = plt.subplots(1, len(titles), figsize=(4.4 * len(titles), 2.9))
    for axes, (column, title) in zip(panels, titles.items()):
        draw_curves(axes, history, column, runs)
        axes.set(title=title, ylim=(0, 11.5 if column.startswith("length") else 1.03))
    for axes in panels[:-1]:
        axes.get_legend().remove()
    _finish(*panels)


def plot_shares(history: pd.DataFrame, chains: pd.DataFrame, iterations: tuple[int, int]) -> None:
    """Left: how many completions show how many cups. Right: how often they are right, by the swaps left for the answer."""
    _, (left, right) = plt.subplots(1, 2, figsize=(8.8, 3.2))
    draw_shares(left, history)
    left.set_title("shown cups, share of the samples")
    draw_by_swaps_left(right, chains, iterations)
    right.set_title("accuracy by swaps left")
    _finish(left, right)


def plot_limits(history: pd.DataFrame) -> None:
    """Left: a limit that fits four swaps, and not five. Right: one that fits neither, with both ways to treat the cut ones."""
    _, (left, right) = plt.subplots(1, 2, figsize=(8.8, 2.9))
    nine = history[history["run"] == "9 tokens"]
    games = [("accuracy_4", "games of four swaps", BLUE, "-"), ("accuracy_5", "games of five swaps", ORANGE, "--")]
    for column, label, color, line in games:
        seeds = nine.pivot(index="iteration", columns="seed", values=column)
        left.plot(seeds.index, seeds, color=color, linestyle=line, linewidth=0.7, alpha=0.6)
        left.plot(seeds.index, seeds.mean(axis=1), color=color, linestyle=line, linewidth=2.5, label=label)
    left.set(title="9 tokens: accuracy, each seed and the mean", xlabel="iteration", ylim=(0, 1.03))
    left.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 1.02))
    draw_curves(right, history, "length", ["7 tokens", "7 tokens, cut left out"])
    right.set(title="7 tokens: mean length", ylim=(0, 7.3))
    right.get_legend().set_loc("lower right")
    _finish(left, right)


def _finish(*axes) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.show()
