"""Baselines: how close each comes to the true value of a prompt, and how noisy it leaves the gradient. A table of each."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from grpo_core.report import BLUE, GRAY, ORANGE, write_figure, write_text
from grpo_core.rivals.baselines import BASELINES, enumerate_completions, gradient_noise, train_critic, value_errors
from grpo_core.studies.runs import write_settings
from grpo_core.task import Addition
from grpo_core.warm_start import warm_start

FOLDER, SEEDS = Path("outputs/baselines"), range(3)


def value_figure(axes, errors: pd.DataFrame) -> None:
    """Error of the group's mean over G, between the batch's mean and the critics."""
    group = errors[errors["estimator"] == "group mean"]
    around = (group["rmse"] - group["rmse_low"], group["rmse_high"] - group["rmse"])
    axes.plot(group["group_size"], group["theory"], color=GRAY, label="√(p(1 − p)/G)")
    axes.errorbar(group["group_size"], group["rmse"], around, fmt="o", color=BLUE, label="mean of a group of G")
    critics = errors.loc[errors["estimator"] == "critic", "rmse"]
    if len(critics):
        axes.axhspan(critics.min(), critics.max(), color=ORANGE, alpha=0.3, linewidth=0, label="critics, 7,680 labels each")
    axes.axhline(
        errors.loc[errors["estimator"] == "batch mean", "rmse"].item(), color="black", linestyle="--", label="batch mean"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(group["group_size"], [f"{size:g}" for size in group["group_size"]])
    axes.set(xlabel="completions in a group, G", ylabel="error (root mean square)", title="How well is the value known?")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def noise_figure(axes, noise: pd.DataFrame) -> None:
    """Noise of the gradient for each baseline, for rewards that differ by an offset, over the least that a constant leaves."""
    styles = zip(noise.groupby("rewards", sort=False), ((BLUE, "o"), (ORANGE, "s"), (GRAY, "^")), (-0.2, 0.0, 0.2))
    for (written, rows), (color, marker), shift in styles:
        around = (rows["ratio"] - rows["ratio_low"], rows["ratio_high"] - rows["ratio"])
        y = [BASELINES.index(name) + shift for name in rows["baseline"]]
        axes.errorbar(rows["ratio"], y, xerr=around, fmt=marker, color=color, markersize=5, label=f"rewards {written}")
    axes.set_yticks(range(len(BASELINES)), BASELINES)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.set(xlabel="variance, in units of the best constant's", title="How noisy is the gradient?")
    axes.legend(frameon=False, fontsize=8)


def baselines_figure(errors: pd.DataFrame, noise: pd.DataFrame) -> Figure:
    """Both studies side by side, with 95 % intervals."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    for axes, draw, frame in zip(figure.subplots(1, 2), (value_figure, noise_figure), (errors, noise)):
        draw(axes, frame)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write(folder: Path, seeds: Sequence[int] = SEEDS, prompts: int = 48, problems: int = 400) -> str:
    """Write value_errors.csv, gradient_noise.csv and baselines.png into `folder`; return the two tables.

    Args:
        seeds: a critic is trained for each; the groups are sampled with the first.
        prompts: held-out problems whose completions are enumerated.
        problems: held-out problems whose values are guessed.
    """
    task, policy = Addition(), warm_start()
    critics = [train_critic(policy, task, seed) for seed in seeds]
    errors = value_errors(policy, task, task.held_out[:problems], critics=critics, seed=seeds[0])
    noise = gradient_noise([enumerate_completions(policy, task, problem) for problem in task.held_out[:prompts]])
    for name, frame in (("value_errors", errors), ("gradient_noise", noise)):
        write_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    write_figure(folder / "baselines.png", baselines_figure(errors, noise))
    settings = {"seeds": list(seeds), "prompts": prompts, "problems": problems}
    write_settings(folder, settings, "grpo_core.rivals.baselines", "grpo_core.warm_start")
    return f"{errors.round(3).to_string(index=False)}\n\n{noise.round(3).to_string(index=False)}"
