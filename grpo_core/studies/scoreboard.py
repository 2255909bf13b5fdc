"""The scoreboard: each method from the same start policy, on the same budget, over the same seeds.

Learning rates, and DPO's beta, were chosen by a sweep, on validation problems and on seeds that the scoreboard does not use.
Other settings were set by hand after a few such runs; settings.json has them all. It is played twice: with 40 gradient steps
on the 7,680 completions, as GRPO's defaults take, and with 160.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo_core.config import GRPOConfig
from grpo_core.evaluate import Estimate, mean_estimate
from grpo_core.report import BLUE, GRAY, ORANGE, write_figure, write_text
from grpo_core.rivals.budget import Budget, Ledger
from grpo_core.rivals.dpo import DPOConfig, train_dpo
from grpo_core.rivals.grpo import train_grpo
from grpo_core.rivals.imitation import ExpertIterationConfig, SupervisedConfig, train_expert_iteration, train_supervised
from grpo_core.rivals.ppo import PPOConfig, train_ppo, train_ppo_with_reward_model
from grpo_core.rivals.reinforce import ReinforceConfig, train_reinforce
from grpo_core.studies.runs import run_all, write_settings
from grpo_core.task import Addition
from grpo_core.warm_start import warm_start


@dataclass(frozen=True)
class Method:
    """A row of the scoreboard.

    Attributes:
        train: (task, policy, budget, config) → Ledger.
        config: its settings, apart from the learning rate.
        learns_from: what it learns from, in words.
        learning_rate: for each number of gradient steps, the one that won the sweep.
    """

    train: Callable[..., Ledger]
    config: Any
    learns_from: str
    learning_rate: dict[int, float]

    def at(self, gradient_steps: int, learning_rate: float | None = None):
        """The settings for this many gradient steps."""
        rate = self.learning_rate[gradient_steps] if learning_rate is None else learning_rate
        return dataclasses.replace(self.config, learning_rate=rate)


METHODS = {
    "GRPO": Method(train_grpo, GRPOConfig(), "verdicts", {40: 2e-4, 160: 2e-4}),
    "RLOO": Method(train_reinforce, ReinforceConfig("leave_one_out"), "verdicts", {40: 1e-4, 160: 2.5e-5}),
    "REINFORCE, batch mean": Method(train_reinforce, ReinforceConfig("batch"), "verdicts", {40: 1e-4, 160: 2.5e-5}),
    "REINFORCE, no baseline": Method(train_reinforce, ReinforceConfig("none"), "verdicts", {40: 2e-4, 160: 5e-5}),
    "PPO, verifier": Method(train_ppo, PPOConfig(), "verdicts", {40: 2e-4, 160: 5e-5}),
    "PPO, reward model": Method(
        train_ppo_with_reward_model, PPOConfig(leash="reward", beta=0.3), "verdicts on half of them", {40: 2.5e-5, 160: 6.25e-6}
    ),
    "DPO": Method(train_dpo, DPOConfig(), "verdicts, as pairs", {40: 2e-4, 160: 5e-5}),
    "expert iteration": Method(train_expert_iteration, ExpertIterationConfig(), "verdicts", {40: 2e-4, 160: 1e-4}),
    "supervised": Method(train_supervised, SupervisedConfig(), "true answers", {40: 2e-4, 160: 2e-4}),
}
STEPS = (40, 160)
FOLDER, SEEDS = Path("outputs/scoreboard"), range(5)
REFERENCE = {"PPO, reward model": 0.298, "DPO": 0.458, "GRPO": 0.522}  # Of the series that started this project.


SPENT = ["completions", "verdicts", "answers", "gradient_steps", "reward_model_steps", "tokens"]


def play(name: str, gradient_steps: int, seed: int, learning_rate: float | None = None) -> list[dict]:
    """One run: its ledger's rows, on held-out problems, or, with a learning rate to try, on validation problems."""
    method, policy = METHODS[name], warm_start()
    evaluate_on = "held_out" if learning_rate is None else "validation"
    budget = Budget(gradient_steps=gradient_steps, seed=seed, evaluate_on=evaluate_on)
    ledger = method.train(Addition(), policy, budget, method.at(gradient_steps, learning_rate))
    return [{"method": name, "steps": gradient_steps, "seed": seed, **row} for row in ledger.rows]


def play_all(seeds: range, methods=tuple(METHODS), steps=STEPS) -> pd.DataFrame:
    """The rows of all runs in one table, in the order of METHODS."""
    jobs = [(name, count, seed) for count in sorted(steps, reverse=True) for name in methods for seed in seeds]
    rows = [row for ledger in run_all(play, jobs) for row in ledger]
    order = {name: i for i, name in enumerate(METHODS)}
    frame = pd.DataFrame(rows).drop(columns=["accuracy_low", "accuracy_high"])
    return frame.sort_values(["steps", "method"], key=lambda x: x.map(order) if x.name == "method" else x, kind="stable")


def final_accuracies(curves: pd.DataFrame, method: str, steps: int) -> list[float]:
    """The last accuracy of each seed, in the order of the seeds."""
    runs = curves[(curves["method"] == method) & (curves["steps"] == steps)].groupby("seed")
    return runs["accuracy"].last().tolist()


def difference(curves: pd.DataFrame, method: str, other: str, steps: int) -> Estimate:
    """How much more accurate a method ends than another: mean of the differences within each seed, with its interval."""
    pairs = zip(final_accuracies(curves, method, steps), final_accuracies(curves, other, steps), strict=True)
    return mean_estimate([a - b for a, b in pairs])


def summarize(curves: pd.DataFrame) -> pd.DataFrame:
    """One row for each method and number of steps: accuracy, difference to GRPO, and all that was spent."""
    rows = []
    for steps in sorted(curves["steps"].unique().tolist()):
        for name in curves["method"].unique():
            runs = curves[(curves["method"] == name) & (curves["steps"] == steps)]
            spent = runs.reindex(columns=["seed", *SPENT]).groupby("seed")[SPENT].last().fillna(0).mean()
            accuracy = mean_estimate(final_accuracies(curves, name, steps))
            row = {"method": name, "steps": steps, "learning_rate": METHODS[name].learning_rate[steps]}
            row |= accuracy.columns("accuracy") | {"worst": min(final_accuracies(curves, name, steps))}
            rows.append(row | difference(curves, name, "GRPO", steps).columns("minus_grpo") | spent.to_dict())
    return pd.DataFrame(rows)


def markdown(summary: pd.DataFrame) -> str:
    """The table for people."""
    columns = ["method", "completions", "verdicts", "true answers", "tokens, 40 steps"]
    columns += ["40 steps", "minus GRPO", "160 steps", "minus GRPO", "reference"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, rows in summary.groupby("method", sort=False):
        spent = rows.sort_values("steps").iloc[0]
        cells = [f"{spent[column]:,.0f}" for column in ("completions", "verdicts", "answers", "tokens")]
        for _, row in rows.iterrows():
            cells.append(str(_estimate(row, "accuracy")))
            cells.append("" if name == "GRPO" else signed(_estimate(row, "minus_grpo")))
        reference = f"{REFERENCE[name]:.3f}" if name in REFERENCE else ""
        lines.append("| " + " | ".join([name, *cells, reference]) + " |")
    return "\n".join(lines) + "\n"


def signed(difference: Estimate) -> str:
    """A difference with its interval and its signs."""
    return f"{difference:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]".replace("-", "−")


def _estimate(row: pd.Series, name: str) -> Estimate:
    return Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"])


def scoreboard_figure(summary: pd.DataFrame) -> Figure:
    """A dot with its 95 % interval for each method, at 40 and at 160 gradient steps, and the reference's dots."""
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    names = summary["method"].unique().tolist()
    for steps, color, marker, shift in ((40, BLUE, "o", -0.15), (160, ORANGE, "s", 0.15)):
        rows = summary[summary["steps"] == steps]
        y = [names.index(name) + shift for name in rows["method"]]
        axes.hlines(y, rows["accuracy_low"], rows["accuracy_high"], color=color, linewidth=2)
        axes.plot(rows["accuracy"], y, marker, color=color, label=f"{steps} gradient steps")
    marks = [(accuracy, names.index(name)) for name, accuracy in REFERENCE.items() if name in names]
    axes.plot(*zip(*marks), "D", color=GRAY, markerfacecolor="white", label="reference series")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="greedy accuracy on held-out sums, mean over seeds, 95 % interval", xlim=(0, 1))
    axes.legend(loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write(folder: Path, seeds: range) -> str:
    """Play all, write curves.csv, scoreboard.csv, .md and .png into `folder`; return the table."""
    curves = play_all(seeds)
    summary = summarize(curves)
    table = markdown(summary)
    for name, frame in (("curves", curves), ("scoreboard", summary)):
        write_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    write_text(folder / "scoreboard.md", table)
    write_figure(folder / "scoreboard.png", scoreboard_figure(summary))
    settings = {
        "seeds": list(seeds),
        "budget": dataclasses.asdict(Budget()),
        "methods": {name: {count: dataclasses.asdict(m.at(count)) for count in STEPS} for name, m in METHODS.items()},
    }
    write_settings(folder, settings, *sorted({method.train.__module__ for method in METHODS.values()}))
    return table
