"""The pictures of notebook 01: where each batch's gradient points, and how runs with and without a baseline fare."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from grpo_core.lab.panel import BLUE, GRAY, ORANGE

STYLES = [(BLUE, "o", "-"), (ORANGE, "s", "--"), (GRAY, "^", ":"), ("black", "v", "-.")]  # Color is never alone.


def plot_batches(along: Mapping[str, Tensor]) -> None:
    """One row for each way to weigh rewards, one dot for each batch: its component along the exact gradient.

    Args:
        along: for each name (batches,) components, in units of the exact gradient's length. At 1 a batch climbs exactly as
            much as the exact gradient; left of 0 it leads downhill.
    """
    _, axes = plt.subplots(figsize=(7.4, 0.55 * len(along) + 0.9))
    for row, values in enumerate(along.values()):
        spread = torch.linspace(-0.25, 0.25, 7).repeat(len(values) // 7 + 1)[: len(values)]  # So that no dot hides another.
        axes.plot(values, row + spread, "o", color=BLUE, markersize=4, alpha=0.4)
        axes.plot(values.mean(), row, "|", color="black", markersize=26, markeredgewidth=2)
    axes.axvline(1, color=ORANGE, linestyle="--", linewidth=1.2)
    axes.axvline(0, color=GRAY, linewidth=0.8)
    axes.set_yticks(range(len(along)), along)
    axes.invert_yaxis()
    axes.set_xlabel("component along the exact gradient (dashed: the exact gradient; bar: mean of all batches)")
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def plot_runs(runs: Mapping[str, Sequence[Sequence[float]]], every: int, ylabel: str = "greedy accuracy, held-out") -> None:
    """Mean over seeds as a line, from the worst to the best seed as a band.

    Args:
        runs: for each name a list over seeds of lists over time, one number every `every` iterations.
    """
    _, axes = plt.subplots(figsize=(7.4, 3.2))
    for (name, seeds), (color, marker, line) in zip(runs.items(), STYLES):
        curves = torch.tensor(seeds)
        x = [every * i for i in range(curves.shape[1])]
        axes.fill_between(x, curves.amin(dim=0), curves.amax(dim=0), color=color, alpha=0.15, linewidth=0)
        axes.plot(x, curves.mean(dim=0), color=color, marker=marker, linestyle=line, label=name)
    axes.set(xlabel="iteration", ylabel=ylabel, ylim=(0, 1))
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()
