"""The scoreboard: its arithmetic, and that what lies in outputs/ is what the present settings give."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from grpo_core import GRPOConfig, History, TrainingDiverged
from grpo_core.evaluate import mean_estimate
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.dpo import DPOConfig
from grpo_core.studies import runs, scoreboard, sweep
from grpo_core.studies.scoreboard import (
    METHODS,
    STEPS,
    difference,
    final_accuracies,
    markdown,
    play,
    scoreboard_figure,
    summarize,
)

OUTPUTS = Path(__file__).parents[1] / "outputs/scoreboard"


@pytest.fixture(scope="module")
def recorded():
    return pd.read_csv(OUTPUTS / "curves.csv")


def curves(accuracies):
    """A table of runs that end with these accuracies: {(method, steps): one for each seed}."""
    spent = {"completions": 8, "verdicts": 8, "answers": 0, "gradient_steps": 2, "tokens": 20}
    rows = [
        {"method": method, "steps": steps, "seed": seed, **spent, "accuracy": value}
        for (method, steps), values in accuracies.items()
        for seed, end in enumerate(values)
        for value in (0.35, end)
    ]
    return pd.DataFrame(rows)


def test_difference_is_taken_within_each_seed():
    frame = curves({("GRPO", 40): [0.7, 0.8, 0.9], ("RLOO", 40): [0.75, 0.84, 0.96]})
    assert final_accuracies(frame, "RLOO", 40) == [0.75, 0.84, 0.96]
    found, expected = difference(frame, "RLOO", "GRPO", 40), mean_estimate([0.05, 0.04, 0.06])
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))
    assert found.low > 0 > difference(frame, "GRPO", "RLOO", 40).high  # As if unpaired, the interval would hold 0.


def test_runs_that_have_no_partner_are_not_compared():
    frame = curves({("GRPO", 40): [0.7, 0.8, 0.9], ("RLOO", 40): [0.75, 0.84]})
    with pytest.raises(ValueError, match="zip"):
        difference(frame, "RLOO", "GRPO", 40)


def test_summary_table_and_figure_say_the_same():
    frame = curves({(name, steps): [0.7, 0.8] for steps in STEPS for name in ("GRPO", "DPO")})
    summary = summarize(frame)
    assert summary["accuracy"].tolist() == pytest.approx([0.75] * 4) and summary["worst"].tolist() == [0.7] * 4
    lines = markdown(summary).splitlines()
    assert len(lines) == 4 and lines[2].startswith("| GRPO | 8 | 8 | 0 | 20 | 0.750 [") and lines[2].endswith("| 0.522 |")
    assert "+0.000 [+0.000, +0.000]" in lines[3]
    (axes,) = scoreboard_figure(summary).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["GRPO", "DPO"]


def test_jobs_come_back_in_their_order():
    assert runs.run_all(divmod, [(7, 2), (9, 4)], processes=2) == [(3, 1), (2, 1)]


def diverge():
    raise TrainingDiverged(3, ValueError("far too large"), GRPOConfig(), None, History())


def test_a_run_that_diverged_says_so_across_processes():
    with pytest.raises(FloatingPointError, match="iteration 3 stopped: far too large"):
        runs.run_all(diverge, [()], processes=1)


def test_what_a_job_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        runs.run_all(divmod, [(7, 0), (9, 4)], processes=1)


def test_learning_rates_are_those_that_won_the_sweep():
    frame = pd.read_csv(OUTPUTS / "sweep.csv")
    assert frame["learning_rate"].unique().tolist() == list(sweep.RATES)
    assert frame["seeds"].unique().tolist() == [len(sweep.SEEDS)]
    assert not set(sweep.SEEDS) & set(scoreboard.SEEDS), "chosen on the seeds that are reported"
    winners = sweep.best(frame)
    inside = winners[winners["method"] != "PPO, reward model"]  # Against a weak judge, the less one learns the better.
    assert not set(inside["learning_rate"]) & {min(sweep.RATES), max(sweep.RATES)}, "the best rate may lie beyond"
    assert len(winners) == len(METHODS) * len(STEPS)
    for row in winners.itertuples():
        assert METHODS[row.method].learning_rate[row.steps] == row.learning_rate, row.method


def test_beta_of_dpo_is_the_one_that_won():
    frame = pd.read_csv(OUTPUTS / "dpo_beta.csv")
    assert tuple(frame["beta"].unique()) == sweep.BETAS
    assert frame.loc[frame["accuracy"].idxmax(), "beta"] == DPOConfig().beta == METHODS["DPO"].config.beta


def test_outputs_are_of_these_settings(recorded):
    settings = json.loads((OUTPUTS / "settings.json").read_text())
    present = {name: {str(n): dataclasses.asdict(m.at(n)) for n in STEPS} for name, m in METHODS.items()}
    assert settings["methods"] == present and settings["budget"] == dataclasses.asdict(Budget())
    assert recorded["seed"].unique().tolist() == settings["seeds"] == list(scoreboard.SEEDS)
    assert recorded["method"].unique().tolist() == list(METHODS)


def test_table_and_summary_are_those_of_the_curves(recorded):
    summary = summarize(recorded)
    pd.testing.assert_frame_equal(summary, pd.read_csv(OUTPUTS / "scoreboard.csv"), check_dtype=False, rtol=1e-4)
    assert (OUTPUTS / "scoreboard.md").read_text(encoding="utf-8") == markdown(summary)


def test_all_spend_the_same(recorded):
    last = recorded.groupby(["method", "steps", "seed"]).last().reset_index()
    assert (last["gradient_steps"] == last["steps"]).all()
    sampling = last["method"] != "supervised"
    assert (last.loc[sampling, "completions"] == 7680).all() and (last.loc[~sampling, "completions"] == 0).all()
    assert (last["answers"] > 0).tolist() == (~sampling).tolist()


@pytest.mark.parametrize("name", ["RLOO", "supervised"])
def test_a_run_comes_out_again(recorded, name, monkeypatch):
    """The first fifth of one run, with room for processors that round differently."""
    torch.set_num_threads(1)
    seen = []

    class Enough(Exception):
        pass

    def step(ledger, *args):
        seen.append(ledger)
        if len(ledger.rows) > 4:
            raise Enough
        return original(ledger, *args)

    original = scoreboard.Ledger.step
    monkeypatch.setattr(scoreboard.Ledger, "step", step)
    with pytest.raises(Enough):
        play(name, 40, 0)
    accuracy = recorded.query("method == @name and steps == 40 and seed == 0")["accuracy"].tolist()
    assert [row["accuracy"] for row in seen[-1].rows] == pytest.approx(accuracy[:5], abs=0.05)
