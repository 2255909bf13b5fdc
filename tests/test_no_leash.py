"""The study without a leash: what it measures, the accidents it plans, and that outputs/no_leash says what is claimed of it."""

import copy
import dataclasses
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from grpo_core import Addition, sample_groups, warm_start
from grpo_core.grpo import grpo_update, sample_iteration
from grpo_core.lab import no_leash_figures
from grpo_core.lab.goodhart_explorer import GoodhartExplorer
from grpo_core.sloppy_grader import HedgedAddition, exact_grader, sloppy_grader, sloppy_start
from grpo_core.studies import no_leash as study
from grpo_core.task import Problem

OUTPUTS = Path(__file__).parents[1] / study.FOLDER


@pytest.fixture(scope="module")
def start():
    return sloppy_start()


@pytest.fixture(scope="module")
def history():
    return pd.read_csv(OUTPUTS / "history.csv")


@pytest.fixture(scope="module")
def recording():
    return json.loads((OUTPUTS / "recording.json").read_text(encoding="utf-8"))


@pytest.fixture
def short(monkeypatch):
    """Few prompts and completions in an iteration."""
    monkeypatch.setattr(study, "CONFIG", dataclasses.replace(study.CONFIG, prompts_per_iteration=4, group_size=4))
    monkeypatch.setattr(study, "RECORDED", study.RECORDED[:1])


# Jobs


def test_each_leash_and_experiment_has_each_seed_once():
    jobs = study.jobs([3, 4])
    assert len(set(jobs)) == len(jobs) == 2 * (len(study.BETAS) + 3 * len(study.FEW_BETAS))
    assert {job.beta for job in jobs if job.experiment == "sloppy grader"} == {0.0, 0.02, 0.08, 0.3, 1.0}
    assert {job.seed for job in jobs} == {3, 4}


@pytest.mark.parametrize("experiment", ["sloppy grader", "exact verifier", "large sums", "bad update"])
def test_only_the_sloppy_experiment_pays_for_hedges(experiment):
    grader = study.Job(experiment, 0.0, 0).task().grader
    assert grader is (sloppy_grader if experiment == "sloppy grader" else exact_grader)


def test_large_sums_are_trained_on_and_both_kinds_are_measured():
    job, all_problems = study.Job("large sums", 0.0, 0), HedgedAddition().held_out
    task, kinds = job.task(), job.measured_on()
    assert all(int(problem.answer) >= 100 for problem in [*task.train, task.example]) and task.example in task.train
    assert all(int(problem.answer) >= 100 for problem in kinds["large"])
    assert all(int(problem.answer) < 100 for problem in kinds["small"])
    assert sorted(kinds["large"] + kinds["small"]) == sorted(all_problems)
    assert min(map(len, kinds.values())) >= 100


def test_one_update_alone_is_bad():
    bad, usual = study.Job("bad update", 0.0, 0), study.Job("exact verifier", 0.0, 0)
    rates = [bad.learning_rate(iteration) for iteration in range(1, 11)]
    assert {usual.learning_rate(iteration) for iteration in range(1, 11)} == {2e-4}
    assert [rate > 2e-4 for rate in rates].count(True) == 1 and rates[5] == pytest.approx(6e-3)


# Runs


def test_run_is_train_with_measurements(short, start):
    """The policy of the study after two iterations is the one that the plain loop gives; the start policy is untouched."""
    before = copy.deepcopy(start.state_dict())
    rows, recording = study.watch(study.Job("sloppy grader", 0.3, 5, iterations=2), start)
    assert all(torch.equal(before[name], weight) for name, weight in start.state_dict().items())
    assert all(weight.requires_grad for weight in start.parameters())

    policy, task = copy.deepcopy(start), HedgedAddition()
    config = dataclasses.replace(study.CONFIG, beta=0.3, seed=5)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(5)
    for iteration in (1, 2):
        grpo_update(policy, start, optimizer, sample_iteration(policy, task, config, generator, iteration), config)
    expected = study.measure(policy, start, task, task.held_out, config, 2)
    assert [row["iteration"] for row in rows] == [0, 2]
    assert {name: rows[1][name] for name in expected} == expected
    assert rows[0]["kl"] == 0 < rows[1]["kl"] and rows[1]["run"] == "beta 0.3"
    assert [entry["iteration"] for entry in recording] == [0]


def test_measurement_is_what_counting_gives(short, start):
    task, config = HedgedAddition(), dataclasses.replace(study.CONFIG, seed=3)
    moved = copy.deepcopy(start)
    with torch.no_grad():
        moved.head.weight.mul_(1.2)
    problems = task.held_out[:48]
    row = study.measure(moved, start, task, problems, config, 7)
    generator = torch.Generator().manual_seed(3007)
    rollout = sample_groups(moved, task, problems, 8, 0.7, generator=generator)
    answers = [problem.answer for problem in problems for _ in range(8)]
    texts = rollout.texts
    assert row["seen"] == pytest.approx(sum(map(sloppy_grader, texts, answers)) / len(texts))
    assert row["true"] == pytest.approx(sum(text == answer + ";" for text, answer in zip(texts, answers)) / len(texts))
    assert row["true"] <= row["seen"]
    assert row["guesses"] == pytest.approx(1 + sum(text.count(",") for text in texts) / len(texts))
    assert row["length"] == pytest.approx(sum(map(len, texts)) / len(texts))
    assert row["well_formed"] == sum(text[:-1].isdigit() and text[-1] == ";" for text in texts) / len(texts)
    assert row["kl"] > 0 and 0 <= row["greedy"] <= 1 and row["entropy"] > 0


def test_recorded_completions_carry_both_rewards(start):
    task = HedgedAddition()
    entry = study.record(start, task, "24+48=", study.CONFIG)
    assert (entry["prompt"], entry["answer"], len(entry["texts"])) == ("24+48=", "72", 8)
    assert entry["seen"] == [sloppy_grader(text, "72") for text in entry["texts"]]
    assert entry["true"] == [exact_grader(text, "72") for text in entry["texts"]]
    assert entry == study.record(start, task, "24+48=", study.CONFIG)


def test_reward_model_run_is_scored_by_the_model_and_measured_by_the_truth(monkeypatch):
    small = dataclasses.replace(study.PPO_BUDGET, iterations=2, gradient_steps=2, prompts_per_iteration=8)
    monkeypatch.setattr(study, "PPO_BUDGET", small)
    monkeypatch.setattr(study, "PAIR_BUDGET", dataclasses.replace(study.PAIR_BUDGET, iterations=2, gradient_steps=2))
    frame = study.watch_reward_model(0.3, 1)
    assert frame["iteration"].tolist() == [0, 1, 2] and set(frame["beta"]) == {0.3}
    assert frame["truth_preferred"].notna().tolist() == [True, False, True]
    assert 0.3 < frame["accuracy"][0] < 0.4 and frame["verdicts"].max() == 0
    assert not frame["score"][1:].isin([0.0, 1.0]).any()


def test_truth_is_set_against_each_wrong_completion():
    task, policy = Addition(), warm_start()
    task.held_out = task.held_out[:20]
    pairs = study.truth_against(policy, task, torch.Generator().manual_seed(0))
    rollout = sample_groups(policy, task, task.held_out, 8, 0.7, generator=torch.Generator().manual_seed(0))
    assert len(pairs) == (rollout.rewards == 0).sum() > 20
    answers = dict(task.held_out)
    for i in range(len(pairs)):
        answer = answers[task.decode(pairs.prompt_ids[i])]
        assert task.decode(pairs.chosen_ids[i]) == answer + ";" and pairs.chosen_mask[i].sum() == len(answer) + 1
        assert task.verify(task.decode(pairs.rejected_ids[i]), answer) == 0


def test_write_leaves_tables_recording_figure_and_settings(short, start, tmp_path, monkeypatch):
    kinds = [("sloppy grader", 0.0), ("sloppy grader", 0.3), ("large sums", 0.0)]
    jobs = [study.Job(experiment, beta, seed, iterations=2) for experiment, beta in kinds for seed in (0, 1)]
    learned = pd.DataFrame({"iteration": [0], "accuracy": [0.5]})
    monkeypatch.setattr(study, "run_all", lambda function, jobs: [function(*job) for job in jobs])
    monkeypatch.setattr(study, "fine_tune", lambda seed: copy.deepcopy(start))
    monkeypatch.setattr(study, "jobs", lambda seeds: jobs)
    monkeypatch.setattr(study, "watch_reward_model", lambda beta, seed: learned.assign(beta=beta, seed=seed))
    said = study.write(tmp_path, range(2))
    assert "greedy" in said and "0.3" in said
    tables = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in ("history", "verifier", "reward_model")}
    assert tables["history"].groupby(["run", "seed", "iteration"]).size().tolist() == [1] * 8
    assert tables["verifier"].groupby(["seed", "measured_on"]).size().tolist() == [2] * 4
    assert len(tables["reward_model"]) == 2 * len(study.FEW_BETAS)
    kept = json.loads((tmp_path / "recording.json").read_text(encoding="utf-8"))
    assert {run: len(entries) for run, entries in kept.items()} == {"beta 0": 1, "beta 0.3": 1}
    assert (tmp_path / "no_leash.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert settings["seeds"] == [0, 1] and settings["modules"] == list(study.MODULES)


def test_start_policy_of_seed_0_is_the_shipped_one(start):
    assert all(torch.equal(a, b) for a, b in zip(study.start_policy(0).parameters(), start.parameters()))


# What lies in outputs


def test_tables_are_whole(history):
    assert history.groupby("run")["seed"].nunique().to_dict() == {f"beta {beta:g}": 3 for beta in study.BETAS}
    assert history.groupby(["run", "seed"])["iteration"].apply(list).map(lambda i: i == list(range(0, 51, 2))).all()
    assert history.notna().all().all()
    assert (history["true"] <= history["seen"]).all() and (history.query("iteration == 0")["kl"] < 1e-6).all()
    verifier = pd.read_csv(OUTPUTS / "verifier.csv")
    assert (verifier["true"] - verifier["seen"]).abs().max() < 1e-5
    assert set(verifier["experiment"]) == {"exact verifier", "large sums", "bad update"}


def test_claims_hold_with_each_seed(history):
    """Collapse with a weak leash, none with a strong one; what is seen rises in all."""
    last = history[history["iteration"] == 50].set_index(["beta", "seed"])
    first = history[history["iteration"] == 0].set_index(["beta", "seed"])
    assert (last["seen"] > first["seen"] + 0.03).all() and (last["seen"][0.0] > first["seen"][0.0] + 0.25).all()
    for beta in (0.0, 0.02, 0.08):
        assert (last["greedy"][beta] < 0.1).all() and (last["true"][beta] < first["true"][beta]).all()
    for beta in (0.3, 1.0):
        assert (last["greedy"][beta] > 0.35).all() and last["greedy"][beta].mean() > first["greedy"][beta].mean() + 0.1


def test_against_the_exact_verifier_the_leash_protects_on_the_way_back_only():
    verifier = pd.read_csv(OUTPUTS / "verifier.csv")
    exact, bad = (
        verifier[verifier["experiment"] == name].set_index(["beta", "seed"]) for name in ("exact verifier", "bad update")
    )
    last = exact[exact["iteration"] == 50]
    assert last["greedy"].min() > 0.65 and last["well_formed"].min() > 0.9
    recovered = bad[bad["iteration"] == 40]["greedy"]
    assert (recovered[0.3] > recovered[0.0] + 0.15).all() and (bad[bad["iteration"] == 6]["greedy"] < 0.15).all()


def test_reward_model_is_led_astray():
    learned = pd.read_csv(OUTPUTS / "reward_model.csv")
    free = learned[learned["beta"] == 0].set_index(["seed", "iteration"])
    assert (free.xs(60, level="iteration")["accuracy"] < 0.1).all()
    assert (free.xs(60, level="iteration")["score"] > free.xs(1, level="iteration")["score"] + 0.4).all()
    preferred = learned.dropna(subset=["truth_preferred"]).pivot_table(
        index=["beta", "seed"], columns="iteration", values="truth_preferred"
    )
    assert (preferred[0] > 0.5).all() and (preferred[60][0.0] < 0.3).all()


def test_recording_is_of_the_first_seed_and_shows_in_the_explorer(history, recording):
    assert list(recording) == [f"beta {beta:g}" for beta in study.BETAS]
    for entries in recording.values():
        assert [entry["iteration"] for entry in entries] == [i for i in range(0, 51, 5) for _ in study.RECORDED]
        for entry in entries:
            assert len(entry["texts"]) == len(entry["seen"]) == len(entry["true"]) == 8
            assert entry["seen"] == [sloppy_grader(text, entry["answer"]) for text in entry["texts"]]
            assert sum(map(int, entry["prompt"].rstrip("=").split("+"))) == int(entry["answer"])
    assert "24+48=" in GoodhartExplorer(history, recording).view()


def test_recorded_run_comes_out_again(history, start):
    """Two iterations of the run without a leash. Other processors round differently, so only nearly."""
    rows, _ = study.watch(study.Job("sloppy grader", 0.0, 0, iterations=2), start)
    saved = history[(history["beta"] == 0) & (history["seed"] == 0)].set_index("iteration")
    for row in rows:
        for column, tolerance in {"seen": 0.05, "true": 0.05, "greedy": 0.06, "kl": 0.05, "guesses": 0.15}.items():
            assert row[column] == pytest.approx(saved[column][row["iteration"]], abs=tolerance), column


def test_files_are_small():
    assert max(path.stat().st_size for path in OUTPUTS.iterdir()) < 300_000


# Figures


@pytest.fixture
def figures(monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    yield shown
    plt.close("all")


def test_goodhart_picture_has_both_rewards_of_each_leash(history):
    axes = study.goodhart_figure(history).axes[0]
    assert len(axes.lines) == 2 * len(study.BETAS)
    ends = sorted(float(line.get_ydata()[-1]) for line in axes.lines)
    last = history[history["iteration"] == 50].groupby("beta")[["seen", "true"]].mean()
    assert ends == pytest.approx(sorted(value for column in last for value in last[column]))
    assert sorted(text.get_text() for text in axes.texts) == sorted(2 * [f"{beta:g}" for beta in study.BETAS])


def test_true_reward_is_drawn_only_when_it_is_known(figures):
    no_leash_figures.plot_rewards([0.2, 0.4])
    no_leash_figures.plot_rewards([0.2, 0.4], [0.2, 0.1])
    assert [len(figure.axes[0].lines) for figure in figures] == [1, 2]


def test_bands_show_mean_and_range_of_the_seeds(figures):
    rows = [
        {"beta": beta, "seed": seed, "iteration": i, "greedy": 0.1 * seed + beta, "kl": i}
        for beta in (0.0, 0.08)
        for seed in (1, 3)
        for i in (0, 2)
    ]
    no_leash_figures.plot_recovery(pd.DataFrame(rows), 1)
    left = figures[0].axes[0]
    curves = {line.get_label(): list(line.get_ydata()) for line in left.lines if line.get_label().startswith("beta")}
    assert curves["beta 0"] == pytest.approx([0.2, 0.2]) and curves["beta 0.08"] == pytest.approx([0.28, 0.28])
    low, high = left.collections[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((0.1, 0.3))


def test_problem_of_each_recorded_prompt_is_a_sum():
    for prompt in study.RECORDED:
        assert any(Problem(prompt, str(sum(map(int, prompt[:-1].split("+"))))) in part for part in parts())


def parts():
    task = HedgedAddition()
    return task.train, task.validation, task.held_out
