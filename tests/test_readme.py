"""The results in the README are those of the runs in outputs/."""

from pathlib import Path

import pandas as pd
import pytest

from grpo_core.evaluate import mean_estimate
from grpo_core.report import over_seeds

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("run", ["five_seeds", "one_gradient_step", "long_run"])
def test_results_are_those_of_the_runs(run):
    frame = pd.read_csv(ROOT / "outputs" / run / "history.csv")
    last = frame[frame["iteration"] == frame["iteration"].max()]
    final = over_seeds(frame, "accuracy").iloc[-1]
    kl = frame.loc[frame["iteration"] > 1, "kl"]
    row = next(line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if f"`outputs/{run}`" in line)
    assert frame["seed"].nunique() == 5
    assert f"{final['value']:.3f}" in row
    assert f"[{final['low']:.3f}, {final['high']:.3f}]" in row
    assert f"{last['accuracy'].min():.3f}" in row
    assert f"{kl.min():.2f} to {kl.max():.2f}" in row


def test_real_models_are_those_of_the_last_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    history = pd.read_csv(ROOT / "outputs/real_models/history.csv").dropna(subset=["accuracy"])
    accuracy = history.pivot_table(index="seed", columns="iteration", values="accuracy")
    gain = mean_estimate((accuracy[20] - accuracy[0]).tolist())
    stale = pd.read_csv(ROOT / "outputs/real_models/stale.csv").groupby("lag")["accuracy"].mean()
    sides = pd.read_csv(ROOT / "outputs/trl_side_by_side/sides.csv").set_index("side")
    row = next(line for line in readme.splitlines() if line.startswith("| `outputs/real_models`"))
    assert f"{accuracy[0].mean():.3f} → **{accuracy[20].mean():.3f}**, a gain of {gain}" in row
    assert ", ".join(f"{stale[lag]:.3f}" for lag in (0, 2, 4, 8)) in row
    row = next(line for line in readme.splitlines() if line.startswith("| `outputs/trl_side_by_side`"))
    for side in ("TRL", "grpo_core"):
        assert "{accuracy:.3f} [{accuracy_low:.3f}, {accuracy_high:.3f}]".format(**sides.loc[side]) in row
    assert f"{sides.milliseconds['TRL'] / sides.milliseconds['grpo_core']:.1f} times" in row


def test_speed_is_that_of_the_last_benchmark():
    benchmark = (ROOT / "outputs" / "benchmark.md").read_text(encoding="utf-8").splitlines()
    headline = next(line for line in benchmark if line.startswith("One iteration"))
    assert headline in (ROOT / "README.md").read_text(encoding="utf-8")


def test_scoreboard_is_that_of_the_last_run():
    table = (ROOT / "outputs/scoreboard/scoreboard.md").read_text(encoding="utf-8")
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
