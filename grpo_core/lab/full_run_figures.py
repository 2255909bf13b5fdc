"""The pictures of notebook 05, and the source of a function without its docstring."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor

from grpo_core.evaluate import Estimate
from grpo_core.lab.panel import BLUE, GRAY, ORANGE


def source_of(function: Callable) -> str:
    """The code of a function as it stands in its file, without the docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    first, *_ = ast.parse(source).body[0].body
    lines = source.splitlines()
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        end = first.end_lineno
        del lines[first.lineno - 1 : end if lines[end : end + 1] != [""] else end + 1]
    return "\n".join(lines)


def plot_loss_and_reward(frame: pd.DataFrame, beta: float) -> None:
    """Left: what the run is for. Right: the loss, and the leash that it contains."""
    _, (left, right) = plt.subplots(1, 2, figsize=(8.6, 2.8))
    left.plot(frame["iteration"], frame["reward"], "o-", color=BLUE, markersize=4)
    left.set(title="mean reward of the samples", xlabel="iteration", ylim=(0, 1))
    right.plot(frame["iteration"], frame["loss"], "o-", color=BLUE, markersize=4, label="loss")
    right.plot(frame["iteration"], beta * frame["kl"], "s--", color=ORANGE, markersize=4, label="leash: beta · KL")
    right.axhline(0, color=GRAY, linewidth=0.8)
    right.set(title="loss", xlabel="iteration")
    right.legend(frameon=False)
    _finish(left, right)


def plot_pass_at_k(before: Tensor, after: Tensor) -> None:
    """pass@k from exact success probabilities, before and after the training."""
    ks = torch.tensor([2**i for i in range(9)])
    _, axes = plt.subplots(figsize=(6.4, 3.0))
    for name, p, color, style in (("start policy", before, ORANGE, "s--"), ("after the run", after, BLUE, "o-")):
        axes.plot(ks, [(1 - (1 - p) ** k).mean() for k in ks.tolist()], style, color=color, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks.tolist(), ks.tolist())
    axes.set(xlabel="k, answers one may hand in", ylabel="pass@k", ylim=(0, 1.03))
    axes.legend(frameon=False, loc="lower right")
    _finish(axes)


def plot_differences(differences: Mapping[str, Estimate]) -> None:
    """A dot with its 95 % interval for each comparison, and the line of no difference."""
    _, axes = plt.subplots(figsize=(7.4, 0.42 * len(differences) + 0.9))
    for row, difference in enumerate(differences.values()):
        seen = difference.low > 0 or difference.high < 0
        color = BLUE if seen else GRAY
        axes.plot([difference.low, difference.high], [row, row], color=color, linewidth=2)
        axes.plot(difference, row, "o", color=color, markerfacecolor=color if seen else "white")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(differences)), differences)
    axes.invert_yaxis()
    axes.set_xlabel("accuracy minus that of the defaults (filled: the interval leaves out 0)")
    _finish(axes)


def _finish(*axes) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.show()
