"""The pictures of notebook 09: learning curves of real models, TRL beside this project, stale rollouts, and writing speed."""

import matplotlib.pyplot as plt
import pandas as pd

from grpo_core.lab.panel import BLUE, GRAY, ORANGE

STYLES = [(BLUE, "o-"), (ORANGE, "s--"), (GRAY, "^:")]  # Color is never alone.


def plot_learning(history: pd.DataFrame) -> None:
    """Left: greedy accuracy with its interval. Right: mean reward of the samples. A line for each seed.

    Args:
        history: columns seed, iteration, accuracy, accuracy_low, accuracy_high, reward.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(8.6, 2.9), sharey=True)
    for (seed, rows), (color, style) in zip(history.groupby("seed"), STYLES * len(history)):
        measured, sampled = rows.dropna(subset=["accuracy"]), rows.dropna(subset=["reward"])
        left.fill_between(
            measured["iteration"], measured["accuracy_low"], measured["accuracy_high"], color=color, alpha=0.15, linewidth=0
        )
        left.plot(measured["iteration"], measured["accuracy"], style, color=color, markersize=4, label=f"seed {seed}")
        right.plot(sampled["iteration"], sampled["reward"], style, color=color, markersize=3, linewidth=1)
    left.set(title="greedy accuracy, held-out, 95 % bands", ylim=(0, 1), xlabel="iteration")
    right.set(title="mean reward of the samples", xlabel="iteration")
    left.legend(frameon=False, fontsize=9)
    _finish(left, right)


def plot_side_by_side(curves: pd.DataFrame) -> None:
    """Mean reward of the samples, by both trainers: mean and range of the seeds, and each seed as a thin line.

    Args:
        curves: columns trainer ("grpo_core" or "TRL"), seed, iteration, reward.
    """
    _, axes = plt.subplots(figsize=(6.4, 3.2))
    for (trainer, rows), (color, style) in zip(curves.groupby("trainer", sort=False), STYLES):
        seeds = rows.pivot(index="iteration", columns="seed", values="reward")
        axes.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), color=color, alpha=0.15, linewidth=0)
        axes.plot(seeds.index, seeds, style[1:], color=color, linewidth=0.7, alpha=0.6)
        axes.plot(seeds.index, seeds.mean(axis=1), style, color=color, markersize=5, linewidth=2, label=trainer)
    axes.set(title="mean reward of the samples: mean and range of the seeds", xlabel="iteration", ylim=(0, 1))
    axes.legend(frameon=False)
    _finish(axes)


def plot_staleness(table: pd.DataFrame, clip_eps: float = 0.2) -> None:
    """Left: where the clip binds. Right: how far the ratios have spread, against the clip's borders.

    Args:
        table: columns lag (iterations since the rollout was sampled), clip_fraction, ratio_low, ratio_high.
        clip_eps: of the run.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(8.6, 2.9))
    left.plot(table["lag"], table["clip_fraction"], "o-", color=ORANGE, markersize=5)
    left.set(title="clip fraction", xlabel="iterations since it was sampled", ylim=(0, None))
    right.fill_between(table["lag"], table["ratio_low"], table["ratio_high"], color=BLUE, alpha=0.2, linewidth=0)
    right.plot(table["lag"], table["ratio_high"], "^-", color=BLUE, markersize=5, label="high")
    right.plot(table["lag"], table["ratio_low"], "v-", color=BLUE, markersize=5, label="low")
    for border, label in ((1 + clip_eps, "the clip's borders"), (1 - clip_eps, None)):
        right.axhline(border, color="black", linestyle="--", linewidth=0.8, label=label)
    right.set(title="ratio of a token, 1 % to 99 %", xlabel="iterations since it was sampled")
    right.legend(fontsize=9)
    _finish(left, right)


def plot_decode(table: pd.DataFrame) -> None:
    """Left: tokens a second at best; a filled mark waits for memory, an open one for arithmetic. Right: writing's share.

    Args:
        table: rows of `grpo_core.bridge.scale.decode_speed`, of up to three models.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.2))
    for (name, rows), (color, style) in zip(table.groupby("name", sort=False), STYLES):
        busy = rows[rows["limit"] == "arithmetic"]
        for axes, column in ((left, "tokens_per_second"), (right, "share")):
            axes.plot(rows["batch"], rows[column], style, color=color, markersize=6, label=name)
            axes.plot(busy["batch"], busy[column], style[0], color=color, markerfacecolor="white", markersize=6)
    left.set(title="tokens a second, at best", yscale="log", xlabel="completions at a time")
    right.set(title="share of an iteration that writing takes", ylim=(0, 1), xlabel="completions at a time")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    left.plot([], [], "o", color="black", label="waits for memory")
    left.plot([], [], "o", color="black", markerfacecolor="white", label="for arithmetic")
    left.legend(frameon=False, fontsize=8)
    _finish(left, right)


def _finish(*axes) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        if each.get_xscale() == "linear":
            each.locator_params(axis="x", integer=True)
    plt.tight_layout()
    plt.show()
