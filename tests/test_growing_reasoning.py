"""The study of growing reasoning: its measurements, its controls, and that outputs/growing_reasoning says what it claims."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from grpo_core import train
from grpo_core.rollout import Rollout
from grpo_core.shell_game import START_POLICY, ShellGame, fine_tune, full_chain, shell_game_start
from grpo_core.studies import growing_reasoning as study
from grpo_core.task import Problem

OUTPUTS = Path(__file__).parents[1] / study.FOLDER


@pytest.fixture(scope="module")
def history():
    return pd.read_csv(OUTPUTS / "history.csv")


@pytest.fixture(scope="module")
def chains():
    return pd.read_csv(OUTPUTS / "chains.csv")


@pytest.fixture
def short(monkeypatch):
    """Two iterations on few prompts, in this process."""
    config = dataclasses.replace(study.CONFIG, iterations=2, prompts_per_iteration=4, evaluate_every=2)
    monkeypatch.setattr(study, "CONFIG", config)
    return config


def rollout(problems, texts, rewards):
    """A rollout that holds these texts, one token a character."""
    lengths = torch.tensor([len(text) for text in texts]).unsqueeze(1)
    mask = torch.arange(int(lengths.max())) < lengths
    empty = torch.zeros_like(mask, dtype=torch.long)
    return Rollout(empty, empty, mask, empty.float(), torch.tensor(rewards), 1.0, texts, problems)


# Measuring


def test_each_completion_is_described():
    problems = [Problem("3bace", "4"), Problem("3bacef", "3")]
    frame = study.completions(rollout(problems, [">1>2>2=4;", "=4;", ">1>2>2", ">1=3;"], [[1.0, 1.0], [0.0, 1.0]]))
    assert frame["swaps"].tolist() == [4, 4, 5, 5]
    assert frame["steps"].tolist() == [3, 0, 3, 1]
    assert frame["left"].tolist() == [1, 4, 2, 4]
    assert frame["right"].tolist() == [1, 1, 0, 1]
    assert frame["length"].tolist() == [9, 3, 6, 5]
    assert frame["ended"].tolist() == [True, True, False, True]
    summary = study.summarize(frame)
    assert summary["accuracy"] == 0.75 and summary["accuracy_4"] == 1 and summary["accuracy_5"] == 0.5
    assert summary["length"] == 23 / 4 and summary["length_right"] == 17 / 3 and summary["length_wrong"] == 6
    assert summary["unfinished"] == 0.25 and summary["full"] == 0.25
    assert [summary[f"share_{steps}"] for steps in range(6)] == [0.25, 0.25, 0, 0.5, 0, 0]


def test_measuring_uses_the_same_dice_and_leaves_the_global_ones_alone():
    policy, state = shell_game_start(), torch.get_rng_state()
    problems = ShellGame().validation[:20]
    first = study.measure(policy, problems=problems)
    assert first.equals(study.measure(policy, problems=problems)) and len(first) == 40
    assert torch.equal(torch.get_rng_state(), state)
    assert (study.measure(policy, 5, problems)["length"] <= 5).all()


def test_swaps_left_are_added_up_over_seeds():
    rows = [
        ("default", 0, 0, 4, 3, 10, 9), ("default", 1, 0, 5, 4, 30, 30), ("default", 0, 0, 4, 0, 50, 10),
        ("default", 0, 0, 4, 4, 10, 10), ("default", 0, 40, 4, 3, 99, 99), ("beta 0", 0, 0, 4, 3, 99, 0),
    ]  # fmt: skip
    chains = pd.DataFrame(rows, columns=["run", "seed", "iteration", "swaps", "steps", "completions", "right"])
    table = study.by_swaps_left(chains)
    assert table.index.tolist() == [1, 4]
    assert table["accuracy"].tolist() == pytest.approx([39 / 40, 0.2])
    assert table["share"].tolist() == pytest.approx([4 / 9, 5 / 9])


# Controls


def test_coin_flips_pay_for_nothing_at_the_promised_rate():
    game = study.CoinFlips(seed=0)
    paid = {text: sum(game.verify(text, "4") for _ in range(4000)) / 4000 for text in ("=4;", "=3;", ">1>2>2=4;", "")}
    assert all(rate == pytest.approx(0.36, abs=0.03) for rate in paid.values())  # Four standard errors.
    again = [study.CoinFlips(seed=1) for _ in range(2)]
    assert [again[0].verify("", "") for _ in range(50)] == [again[1].verify("", "") for _ in range(50)]


def runs(trainer, **changes):
    """Weights after two iterations, and the rollouts."""
    config = dataclasses.replace(study.CONFIG, iterations=2, prompts_per_iteration=4, evaluate_every=2, **changes)
    policy, rollouts = shell_game_start(), []
    trainer(ShellGame(), policy, config, lambda row, rollout: rollouts.append(rollout))
    return policy.state_dict(), rollouts


def test_where_nothing_is_cut_off_leaving_it_out_changes_nothing():
    (plain, rollouts), (without, _) = runs(train, max_new_tokens=14), runs(study.train_without_cut, max_new_tokens=14)
    assert rollouts[0] is None and all(text.endswith(";") for rollout in rollouts[1:] for text in rollout.texts)
    assert all(torch.equal(plain[name], without[name]) for name in plain)


def test_what_is_cut_off_is_out_of_the_loss_but_not_out_of_the_mean():
    (plain, _), (without, rollouts) = runs(train, max_new_tokens=5), runs(study.train_without_cut, max_new_tokens=5)
    cut = torch.tensor([not text.endswith(";") for rollout in rollouts[1:] for text in rollout.texts])
    masks = torch.cat([rollout.completion_mask for rollout in rollouts[1:]])
    rewards = torch.cat([rollout.rewards.flatten() for rollout in rollouts[1:]])
    assert cut.any() and not masks[cut].any() and masks[~cut].any(dim=1).all() and not rewards[cut].any()
    assert not all(torch.equal(plain[name], without[name]) for name in plain)


def test_a_start_policy_without_the_full_chain_is_refused(monkeypatch, tmp_path):
    assert study.start_policy(0, tmp_path) == START_POLICY
    monkeypatch.setattr(study, "fine_tune", lambda task, seed: fine_tune(ShellGame((2,)), seed, steps=1))
    with pytest.raises(ValueError, match=r"seed 1 gets .* of its full chains right: take another seed"):
        study.start_policy(1, tmp_path)


# One run, all files


def test_a_run_is_measured_before_it_and_after_each_iteration(short):
    history, chains, frames = study.play("default", 0, START_POLICY)
    assert [row["iteration"] for row in history] == [0, 2]
    assert history[0] == {"run": "default", "seed": 0, "iteration": 0, **study.summarize(study.measure(shell_game_start()))}
    assert history[1]["accuracy"] != history[0]["accuracy"]
    for row in history:
        own = [chain for chain in chains if chain["iteration"] == row["iteration"]]
        assert sum(chain["completions"] for chain in own) == 800
        assert sum(chain["right"] for chain in own) == pytest.approx(800 * row["accuracy"])
    assert [frame["iteration"] for frame in frames] == [0, 2]


def test_all_files_are_written(short, monkeypatch, tmp_path):
    monkeypatch.setattr(study, "start_policy", lambda seed, folder: START_POLICY)
    names = ["default", "random reward", "beta 1", "sequence"]
    monkeypatch.setattr(study, "VARIANTS", {name: study.VARIANTS[name] for name in names})
    monkeypatch.setattr(study, "run_all", lambda function, jobs: [function(*job) for job in jobs])
    few, measure = ShellGame().held_out[::10], study.measure
    monkeypatch.setattr(study, "measure", lambda policy, max_new_tokens: measure(policy, max_new_tokens, few))
    table = study.write(tmp_path, range(2))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in OUTPUTS.iterdir()}
    assert table == (tmp_path / "growing_reasoning.md").read_text()
    lines = table.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["start", *names]
    history = pd.read_csv(tmp_path / "history.csv")
    fresh = pd.read_csv(tmp_path / "fresh.csv")
    assert len(history) == 4 * 2 * 2 and set(fresh["seed"]) == {2, 3} and set(fresh["run"]) == {"default", "sequence"}
    assert list(history) == list(fresh)
    assert list(history) == list(pd.read_csv(OUTPUTS / "history.csv"))
    assert json.loads((tmp_path / "settings.json").read_text())["seeds"] == [0, 1]


def test_figure_shows_what_the_tables_say(history, chains):
    panels = study.figure(history, chains).axes
    accuracy, length, shares, left = panels
    for axes, column in ((accuracy, "accuracy"), (length, "length")):
        for line, run in zip(axes.lines, ("default", "random reward", "beta 1")):
            means = history[history["run"] == run].groupby("iteration")[column].mean()
            assert line.get_label() == run and list(line.get_ydata()) == pytest.approx(means.tolist())
    assert len(shares.collections) == 5
    assert list(left.lines[1].get_ydata()) == study.by_swaps_left(chains, iteration=40)["accuracy"].tolist()


# What lies in outputs/


def ends(history, run, column):
    return pd.Series(study.last(history, run, column))


def test_chains_grow_and_become_right_on_each_seed(history):
    begin, end = (history.query(f"run == 'default' and iteration == {i}").set_index("seed") for i in (0, 40))
    assert len(end) == 3
    assert (begin["accuracy"] < 0.45).all() and (end["accuracy"] > 0.9).all()
    assert (end["length"] - begin["length"] > 4).all()
    assert (begin["full"] < 0.2).all() and (end["full"] > 0.88).all()


def test_controls_do_what_the_notebook_says(history):
    begin = history.query("run == 'default' and iteration == 0")["length"].mean()
    assert abs(ends(history, "random reward", "length") - begin).mean() < 1
    assert ends(history, "random reward", "accuracy").max() < 0.5
    assert ends(history, "beta 1", "accuracy").max() < 0.7 < 0.9 < ends(history, "beta 0", "accuracy").min()
    for aggregation in ("sequence", "constant"):
        assert abs(ends(history, aggregation, "length") - ends(history, "default", "length")).max() < 0.5
    assert ends(history, "7 tokens", "length").mean() < begin and ends(history, "7 tokens", "accuracy").max() < 0.4


@pytest.mark.parametrize("file", ["history", "fresh"])
def test_wrong_completions_are_longer_with_the_sequence_mean(file):
    late = pd.read_csv(OUTPUTS / f"{file}.csv").query("iteration >= 20").groupby(["run", "seed"])["length_wrong"].mean()
    assert len(late["default"]) == 3 and (late["sequence"] - late["default"] > 0.3).all()


def test_two_iterations_of_the_recorded_run_come_out_again(history, monkeypatch):
    monkeypatch.setattr(study, "CONFIG", dataclasses.replace(study.CONFIG, iterations=2))
    again = pd.DataFrame(study.play("default", 0, START_POLICY)[0])
    recorded = history.query("run == 'default' and seed == 0 and iteration <= 2")
    for column, tolerance in (("accuracy", 0.02), ("length", 0.15), ("full", 0.02)):
        assert again[column].tolist() == pytest.approx(recorded[column].tolist(), abs=tolerance), column


def test_recording_is_true_and_the_player_can_read_it(history):
    from grpo_core.lab.chain_player import ChainPlayer

    game, frames = ShellGame(), json.loads((OUTPUTS / "recording.json").read_text())
    assert [frame["iteration"] for frame in frames] == list(range(0, 41, 2))
    default = history.query("run == 'default' and seed == 0").set_index("iteration")
    for frame in frames:
        assert frame["rewards"] == [game.verify(text, frame["answer"]) for text in frame["texts"]]
        assert frame["accuracy"] == pytest.approx(default["accuracy"][frame["iteration"]], abs=1e-4)
        assert sum(frame["lengths"].values()) == 800
    problem = Problem(frames[0]["prompt"], frames[0]["answer"])
    assert problem in game.held_out
    assert frames[-1]["texts"].count(full_chain(problem)) >= 6 > frames[0]["texts"].count(full_chain(problem))
    assert len(ChainPlayer.from_json(OUTPUTS / "recording.json").frames) == len(frames)
