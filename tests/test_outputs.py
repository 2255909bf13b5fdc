"""What lies in outputs/ was made by the present code: its version is written there, and a cheap part of it is made again."""

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest

from grpo_core import Addition, GRPOConfig, train, warm_start
from grpo_core.provenance import code_version, start_policies
from grpo_core.studies import growing_reasoning, no_leash

OUTPUTS = Path(__file__).parents[1] / "outputs"
SETTINGS = sorted(OUTPUTS.rglob("settings.json"))
MAIN = ("grpo_core.grpo", "grpo_core.warm_start")  # What decides the numbers of `python -m grpo_core`.
TOLERANCE = 0.04  # Processors round differently, and a few samples in a hundred may come out differently.


def test_there_is_something_to_compare():
    assert len(SETTINGS) >= 5


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: str(path.parent.relative_to(OUTPUTS)))
def test_code_is_that_which_made_the_results(path):
    settings = json.loads(path.read_text(encoding="utf-8"))
    assert settings["code"] == code_version(*settings.get("modules", MAIN)), "make results"
    assert settings["start_policies"] == start_policies(), "make results"


def test_settings_of_the_studies_are_the_present_ones():
    saved = {name: json.loads((OUTPUTS / name / "settings.json").read_text()) for name in ("growing_reasoning", "no_leash")}
    assert saved["growing_reasoning"]["config"] == asdict(growing_reasoning.CONFIG)
    assert saved["growing_reasoning"]["runs"] == {name: v.changes for name, v in growing_reasoning.VARIANTS.items()}
    assert saved["no_leash"]["config"] == asdict(no_leash.CONFIG) and saved["no_leash"]["ppo"] == asdict(no_leash.PPO_BUDGET)
    assert saved["no_leash"]["betas"] == list(no_leash.BETAS) and saved["no_leash"]["bad_update"] == no_leash.BAD_UPDATE


@pytest.mark.parametrize("folder", [".", "five_seeds", "one_gradient_step", "long_run"])
def test_two_iterations_of_a_run_come_out_again(folder):
    settings = json.loads((OUTPUTS / folder / "settings.json").read_text(encoding="utf-8"))
    recorded = pd.read_csv(OUTPUTS / folder / "history.csv").query("seed == 0").set_index("iteration")
    config = GRPOConfig(**settings["config"])
    history = train(Addition(), warm_start(), config, should_stop=stop_after(2)).frame.set_index("iteration")
    assert history["accuracy"][0] == pytest.approx(recorded["accuracy"][0], abs=0.01)
    for column in ("reward", "entropy", "completion_length"):
        assert history[column].loc[1:2].tolist() == pytest.approx(recorded[column].loc[1:2].tolist(), abs=TOLERANCE), column


def stop_after(iterations):
    """Row 0 and so many iterations."""
    asked = iter(range(iterations + 2))
    return lambda: next(asked) > iterations


def test_two_iterations_without_a_leash_come_out_again():
    recorded = pd.read_csv(OUTPUTS / "no_leash" / "history.csv").query("beta == 0 and seed == 0").set_index("iteration")
    rows, _ = no_leash.watch(no_leash.Job("sloppy grader", 0.0, seed=0, iterations=2), no_leash.start_policy(0))
    again = pd.DataFrame(rows).set_index("iteration")
    for column in ("seen", "true", "greedy", "entropy"):
        assert again[column].tolist() == pytest.approx(recorded[column].loc[[0, 2]].tolist(), abs=TOLERANCE), column
