"""The study of the small Llama: what lies in outputs/ is what the present code and model give, and a run begins again alike."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import torch

pytest.importorskip("transformers", reason='needs pip install -e ".[real]"')

from grpo_core import train
from grpo_core.studies import real_models

OUTPUTS = Path(__file__).parents[2] / "outputs/real_models"


def test_settings_and_model_are_the_present_ones():
    saved = json.loads((OUTPUTS / "settings.json").read_text(encoding="utf-8"))
    assert saved["config"] == asdict(real_models.CONFIG) and saved["lags"] == list(real_models.LAGS)
    assert saved["tiny_llama"] == real_models.model_version()


def test_an_iteration_of_a_run_comes_out_again():
    recorded = pd.read_csv(OUTPUTS / "history.csv").query("seed == 0").set_index("iteration")
    policy, task = real_models.start()
    config, asked = replace(real_models.CONFIG, evaluate_every=100), iter([False, False, True])
    again = train(task, policy, config, should_stop=lambda: next(asked)).frame.set_index("iteration")
    assert again["accuracy"][0] == pytest.approx(recorded["accuracy"][0], abs=0.01)
    for column in ("reward", "entropy", "completion_length"):
        assert again[column][1] == pytest.approx(recorded[column][1], rel=0.05), column


def test_without_a_lag_a_stale_run_is_the_plain_one(monkeypatch):
    """And with a lag, the samples of iteration 3 come from the policy after iteration 1."""
    monkeypatch.setattr(real_models, "CONFIG", replace(real_models.CONFIG, prompts_per_iteration=2, group_size=4, iterations=3))
    sampled_by = []
    sample = real_models.sample_iteration

    def watch(policy, *arguments):
        sampled_by.append({name: weight.clone() for name, weight in policy.state_dict().items()})
        return sample(policy, *arguments)

    monkeypatch.setattr(real_models, "sample_iteration", watch)
    monkeypatch.setattr(real_models, "greedy_accuracy", lambda *_: 0.5)
    real_models.train_stale(seed=0, lag=0)
    plain, _ = sampled_by[:], sampled_by.clear()
    real_models.train_stale(seed=0, lag=2)

    policy, task = real_models.start()
    seen = []
    config = replace(real_models.CONFIG, evaluate_every=100)
    train(replace_held_out(task), policy, config, lambda *_: seen.append(copy_of(policy)))
    assert all(same(one, other) for one, other in zip(plain, seen))
    assert same(sampled_by[1], sampled_by[0]) and same(sampled_by[2], sampled_by[0])


def replace_held_out(task):
    task.held_out = task.held_out[:2]
    return task


def copy_of(policy):
    return {name: weight.clone() for name, weight in policy.state_dict().items()}


def same(one, other):
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_summary_names_gain_and_lags():
    history = pd.DataFrame({"seed": [0, 0, 1, 1], "iteration": [0, 5] * 2, "accuracy": [0.3, 0.6, 0.3, 0.8]}).assign(
        pass_at_8=0.75
    )
    stale = pd.DataFrame({"lag": [0, 0], "clip_fraction": [0.1, 0.3], "accuracy": [0.5, 0.7]})
    text = real_models.summary(history, stale)
    assert "iteration   5: greedy accuracy 0.700" in text and "gain 0.400" in text and "pass@8 of the start 0.750" in text
    assert "samples 0 iterations old: clip fraction 0.200" in text
