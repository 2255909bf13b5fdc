"""The pictures of notebook 06: the quietest baseline, a reward model's calibration, PPO against it, and DPO's beta."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd

from grpo_core.lab.panel import BLUE, GRAY, ORANGE

STYLES = [(BLUE, "o-"), (ORANGE, "s--"), (GRAY, "^:")]  # Color is never alone.


def plot_constants(values: Sequence[float], constants: Sequence[float]) -> None:
    """A dot for each prompt: the quietest constant baseline against the exact value, and what two guesses would give."""
    _, axes = plt.subplots(figsize=(5.2, 3.6))
    axes.plot([0, 1], [0, 1], "--", color=GRAY, label="the exact value, p")
    axes.plot([0, 1], [1, 0], ":", color=ORANGE, linewidth=2, label="1 − p, as for the coin")
    axes.plot(values, constants, "o", color=BLUE, markersize=5, alpha=0.7, label="quietest constant, one prompt")
    axes.set(xlabel="exact value p of the prompt", ylabel="baseline", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False, fontsize=9)
    _finish(axes)


def plot_calibration(bins: pd.DataFrame) -> None:
    """How often the model is right against how sure it says it is; a dot on the line is honest.

    Args:
        bins: what `calibration` returns.
    """
    _, axes = plt.subplots(figsize=(4.6, 3.4))
    axes.plot([0.5, 1], [0.5, 1], "--", color=GRAY, label="as sure as it should be")
    around = bins["observed"] - bins["observed_low"], bins["observed_high"] - bins["observed"]
    axes.errorbar(bins["predicted"], bins["observed"], around, fmt="o", color=BLUE, capsize=3, label="held-out pairs, 95 %")
    for row in bins.itertuples():
        axes.annotate(f" {row.pairs}", (row.predicted, row.observed), fontsize=8, va="bottom")
    axes.set(xlabel="how sure it says it is", ylabel="how often it is right", xlim=(0.48, 1.02), ylim=(0.3, 1.04))
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    _finish(axes)


def plot_against_reward_model(judged: pd.DataFrame, verified: pd.DataFrame) -> None:
    """Left: the score that PPO was paid, and the verifier's reward for the same samples. Right: accuracy, and that of a run
    that the verifier paid.

    Args:
        judged, verified: frames of ledgers of `train_ppo`, with a reward model and without.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(8.6, 2.9))
    left.plot(judged["score"], "o-", color=BLUE, markersize=4, label="the judge's score")
    left.plot(judged["reward"], "^:", color=GRAY, markersize=4, label="the verifier's reward, unseen")
    left.set(title="samples of the run that the judge paid", xlabel="iteration")
    right.plot(judged["accuracy"], "o-", color=BLUE, markersize=4, label="paid by the judge")
    right.plot(verified["accuracy"], "s--", color=ORANGE, markersize=4, label="paid by the verifier")
    right.set(title="greedy accuracy, held-out", xlabel="iteration", ylim=(0, 1))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    _finish(left, right)


def plot_dpo(runs: Mapping[float, pd.DataFrame]) -> None:
    """For each beta a panel: how far chosen and rejected completions have moved, in nats; and all accuracies.

    Args:
        runs: for each beta the frame of the ledger of `train_dpo`.
    """
    _, panels = plt.subplots(1, len(runs) + 1, figsize=(10, 2.8))
    for axes, (beta, frame) in zip(panels, runs.items()):
        axes.plot(frame["gradient_steps"], frame["chosen"], "o-", color=BLUE, markersize=4, label="chosen")
        axes.plot(frame["gradient_steps"], frame["rejected"], "s--", color=ORANGE, markersize=4, label="rejected")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(title=f"beta {beta:g}", xlabel="gradient step", ylabel="change of log-prob")
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    for (beta, frame), (color, style) in zip(runs.items(), STYLES):
        panels[-1].plot(frame["gradient_steps"], frame["accuracy"], style, color=color, markersize=4, label=f"beta {beta:g}")
    panels[-1].set(title="accuracy", xlabel="gradient step", ylim=(0, 1))
    panels[-1].legend(frameon=False, fontsize=8)
    _finish(*panels)


def _finish(*axes) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.show()
