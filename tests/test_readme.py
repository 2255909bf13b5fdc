"""The results in the README are those of the runs in outputs/."""

from pathlib import Path

import pandas as pd
import pytest

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


def test_speed_is_that_of_the_last_benchmark():
    benchmark = (ROOT / "outputs" / "benchmark.md").read_text(encoding="utf-8").splitlines()
    headline = next(line for line in benchmark if line.startswith("One iteration"))
    assert headline in (ROOT / "README.md").read_text(encoding="utf-8")


def test_scoreboard_is_that_of_the_last_run():
    table = (ROOT / "outputs/scoreboard/scoreboard.md").read_text(encoding="utf-8")
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
