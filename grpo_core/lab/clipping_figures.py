"""The pictures of notebook 03: how ratios spread over the steps on one rollout, and where lengths drift."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from grpo_core.lab.panel import BLUE, GRAY, ORANGE


def plot_ratios(ratios: Mapping[int, Tensor], low: float = 0.8, high: float = 1.2) -> None:
    """One histogram for each step: the ratios that its gradient saw. The band is gray; what lies outside is orange.

    Args:
        ratios: for each step (tokens,) ratios. Both axes are logarithmic, so that 2 and 1/2 are equally far from 1, and
            a few tokens far out can be seen beside hundreds at 1.
    """
    _, panels = plt.subplots(1, len(ratios), figsize=(2.4 * len(ratios), 2.5), sharey=True)
    edges = torch.logspace(-3, 3, 61, base=2.0)
    for axes, (step, values) in zip(panels, ratios.items()):
        values = values.clamp(edges[0], edges[-1])
        inside = (values >= low) & (values <= high)
        bars = ([values[inside].numpy(), values[~inside].numpy()], edges.numpy())
        axes.axvspan(low, high, color=GRAY, alpha=0.2, linewidth=0)
        axes.hist(*bars, stacked=True, color=[BLUE, ORANGE], label=["inside", "outside"])
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
        axes.set(yscale="log", title=f"before step {step}", xlabel="ratio")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens")
    panels[0].legend(frameon=False, fontsize=8)
    plt.tight_layout()
    plt.show()


def plot_lengths(histories: Mapping[str, Tensor]) -> None:
    """One panel for each way to average: mean length of right and of wrong answers over the steps.

    Args:
        histories: for each name (seeds, steps, 2), wrong answers first. Thin lines are seeds, the thick line their mean.
    """
    _, panels = plt.subplots(1, len(histories), figsize=(8, 2.7), sharey=True)
    for axes, (name, history) in zip(panels, histories.items()):
        for column, color, line, label in [(0, ORANGE, "--", "wrong answers"), (1, BLUE, "-", "right answers")]:
            axes.plot(history[:, :, column].T, color=color, linestyle=line, linewidth=0.6, alpha=0.5)
            axes.plot(history[:, :, column].mean(dim=0), color=color, linestyle=line, linewidth=2, label=label)
        axes.set(yscale="log", title=name, xlabel="step")
        axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"], minor=False)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean length in tokens")
    panels[0].legend(frameon=False, fontsize=8)
    plt.tight_layout()
    plt.show()
