"""What a run shows: two figures, the worked group, the history, and a table for the terminal.

Figures are drawn on `Figure` objects that pyplot never sees, so that they can be drawn on any thread and in any number.
"""

import io
import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_core.advantages import group_advantages
from grpo_core.checkpoint import write_atomically
from grpo_core.config import GRPOConfig
from grpo_core.evaluate import mean_estimate
from grpo_core.history import History
from grpo_core.rollout import Rollout

BLUE, ORANGE, GRAY = "#0072b2", "#d55e00", "#767676"  # Told apart by every kind of color vision.
REFERENCE = {0: 0.360, 5: 0.488, 10: 0.555, 15: 0.610, 20: 0.522}  # The accuracy of the run that started this project.
KL_BAND = (0.02, 0.4)  # Between a policy that has not moved and one that has forgotten where it came from.


def combine(histories: dict[int, History]) -> pd.DataFrame:
    """The rows of several runs in one table, with their `seed` in the first column."""
    return pd.concat([history.frame.assign(seed=seed) for seed, history in histories.items()]).pipe(
        lambda frame: frame[["seed", *frame.columns.drop("seed")]]
    )


def over_seeds(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Value, low and high of a column at each iteration where it was measured.

    With several seeds: their mean and its 95 % interval. With one: its own interval, where it has one.
    """
    measured = frame.dropna(subset=[column])
    if frame["seed"].nunique() > 1:
        rows = {i: mean_estimate(group[column].tolist()) for i, group in measured.groupby("iteration")}
        curve = pd.DataFrame({i: (e.value, e.low, e.high) for i, e in rows.items()}, index=["value", "low", "high"]).T
        return curve.clip(0, 1) if column == "accuracy" else curve  # Student's interval does not know where a share ends.
    low, high = (f"{column}_low", f"{column}_high") if f"{column}_low" in frame else (column, column)
    return measured.set_index("iteration")[[column, low, high]].set_axis(["value", "low", "high"], axis=1)


def accuracy_figure(frame: pd.DataFrame) -> Figure:
    """Held-out greedy accuracy over iterations with its 95 % band, beside the reference run."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    _curve(axes, over_seeds(frame, "accuracy"), _label(frame, "accuracy"))
    if 20 <= frame["iteration"].max() <= 100:  # On a longer axis the reference run is a speck.
        axes.plot(list(REFERENCE), list(REFERENCE.values()), "s--", color=ORANGE, markersize=4, label="reference run")
    axes.set(xlabel="iteration", ylabel="greedy accuracy", ylim=(0, 1), title="GRPO on two-digit sums")
    axes.legend(loc="lower right", frameon=False)
    return figure


def kl_figure(frame: pd.DataFrame) -> Figure:
    """Mean KL per token to the start policy over iterations, with the band of a healthy run."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.axhspan(*KL_BAND, color=GRAY, alpha=0.15, linewidth=0, label=f"{KL_BAND[0]} to {KL_BAND[1]}")
    _curve(axes, over_seeds(frame, "kl"), _label(frame, "kl"))
    axes.set(xlabel="iteration", ylabel="KL to the start policy (nats per token)", title="How far the policy has moved")
    axes.set_ylim(0, max(1.15 * KL_BAND[1], axes.get_ylim()[1]))
    axes.legend(loc="lower right", frameon=False)
    return figure


def _curve(axes, curve: pd.DataFrame, label: str) -> None:
    x = curve.index.to_numpy(dtype=float)
    axes.plot(x, curve["value"], "o-" if len(x) <= 50 else "-", color=BLUE, markersize=4, label=label)
    axes.fill_between(x, curve["low"], curve["high"], color=BLUE, alpha=0.2, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)


def _label(frame: pd.DataFrame, column: str) -> str:
    seeds = frame["seed"].nunique()
    if seeds > 1:
        return f"GRPO, mean of {seeds} seeds, 95 % band"
    return "GRPO, 95 % band" if f"{column}_low" in frame else "GRPO"


def group_example(rollout: Rollout, config: GRPOConfig, group: int = 0) -> str:
    """A group of a rollout as a table: completions, rewards, advantages."""
    rewards = rollout.rewards[group : group + 1].cpu()
    advantages = group_advantages(rewards, config.scale, config.std_eps, config.correction)[0].tolist()
    size, problem = rollout.group_size, rollout.problems[group]
    texts = rollout.texts[group * size : (group + 1) * size]
    table = [
        ["completion", *texts],
        ["reward", *(f"{reward:g}" for reward in rewards[0].tolist())],
        ["advantage", *(f"{advantage:+.3f}".replace("-", "−") for advantage in advantages)],
    ]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|" + "---|" * (size + 1))
    return f"Prompt {problem.prompt}  true answer {problem.answer}\n\n" + "\n".join(lines) + "\n"


def summary_table(frame: pd.DataFrame, every: int = 5) -> str:
    """Accuracy with its interval, reward and KL, at every fifth iteration and the last."""
    curves = {name: over_seeds(frame, name) for name in ("accuracy", "reward", "kl")}
    last = frame["iteration"].max()
    lines = [f"{'iteration':>9}  {'accuracy':>8}  {'95 % interval':>15}  {'reward':>6}  {'KL':>5}"]
    for iteration, row in curves["accuracy"].iterrows():
        if iteration % every == 0 or iteration == last:
            reward, kl = (curves[name]["value"].get(iteration, float("nan")) for name in ("reward", "kl"))
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            lines.append(
                f"{iteration:>9}  {row['value']:>8.3f}  {interval:>15}  {reward:>6.3f}  {kl:>5.3f}".replace("nan", "  –")
            )
    return "\n".join(lines)


def write_report(histories: dict[int, History], folder: Path) -> pd.DataFrame:
    """Write history.csv, grpo_accuracy.png and grpo_kl.png into `folder`; return the table of all runs."""
    frame = combine(histories)
    write_text(folder / "history.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    write_figure(folder / "grpo_accuracy.png", accuracy_figure(frame))
    write_figure(folder / "grpo_kl.png", kl_figure(frame))
    return frame


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: Path, data: dict) -> None:
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_figure(path: Path, figure: Figure) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
