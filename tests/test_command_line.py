"""The command line: `python -m grpo_core`, from --help to --resume."""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pandas as pd
import pytest
import torch

from grpo_core import Addition, GRPOConfig, greedy_accuracy, warm_start
from grpo_core.__main__ import STUDIES, main, parse
from grpo_core.history import COLUMNS
from grpo_core.provenance import code_version

FILES = ["group_example.txt", "grpo_accuracy.png", "grpo_kl.png", "history.csv", "settings.json"]
TINY = ["--iterations", "2", "--prompts-per-iteration", "4"]


@pytest.fixture(autouse=True)
def keep_the_number_of_threads():
    """The command line sets it for its process, which here is pytest's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def flag(name):
    return "--" + name.replace("_", "-")


def refused(capsys, *arguments):
    """What `main` says when it ends with exit status 1 and one line."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, str), "a string is printed, and is exit status 1"
    assert end.value.code.startswith("error: ") and len(end.value.code.splitlines()) == 1, end.value.code
    assert "Traceback" not in capsys.readouterr().err
    return end.value.code


# --help


@pytest.fixture
def help_text(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert not end.value.code
    return capsys.readouterr().out


def help_of_flags(text):
    """{flag: its help}, from the boxes that tyro draws."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines()]
    flags = re.split(r"(?m)^(--[a-z-]+)", "\n".join(lines))
    return {name: " ".join(about.split()) for name, about in zip(flags[1::2], flags[2::2])}


def test_help_explains_every_setting_with_words_of_its_own(help_text):
    about = help_of_flags(help_text)
    texts = []
    for name in [field.name for field in fields(GRPOConfig)] + ["seeds", "output", "resume"]:
        explanation = re.fullmatch(r"(?:, --no-)?\S+ (.*) \(default: .*\)", about[flag(name)])[1]
        assert len(explanation.split()) >= 4, f"{flag(name)}: {explanation!r}"
        texts.append(explanation)
    assert len(set(texts)) == len(texts), "two flags share one explanation: one of the fields has no comment"


def test_help_names_the_other_command_and_each_default(help_text):
    assert "warm-start" in help_text
    for field in fields(GRPOConfig):
        assert f"(default: {field.default})" in help_of_flags(help_text)[flag(field.name)]


def test_defaults_of_the_command_line_are_those_of_the_config():
    settings = parse([])
    assert settings.config == GRPOConfig()
    assert (settings.seeds, str(settings.output), settings.resume) == (1, "outputs", False)


@pytest.mark.parametrize("field", fields(GRPOConfig), ids=lambda field: field.name)
def test_each_field_is_a_flag(field):
    others = {"schedule": "linear", "kl": "k1", "scale": "none", "aggregation": "sequence", "evaluate_on": "validation"}
    numbers = {"clip_eps_high": 0.3, "micro_batch": 5, "correction": 1, "device": "cpu:0"}
    usual = field.default + 1 if isinstance(field.default, int) else 0.5
    value = (others | numbers).get(field.name, usual)
    assert asdict(parse([flag(field.name), str(value)]).config) == asdict(GRPOConfig()) | {field.name: value}


# A run


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """A real process, once: its folder and what it printed."""
    output = tmp_path_factory.mktemp("run") / "results"
    command = [sys.executable, "-m", "grpo_core", *TINY, "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    return output, run.stdout, run.stderr


def test_a_run_writes_its_files(tiny_run):
    output, _, _ = tiny_run
    assert sorted(path.name for path in output.iterdir()) == sorted([*FILES, "checkpoints"])
    history = pd.read_csv(output / "history.csv")
    assert list(history.columns) == ["seed", *COLUMNS]
    assert history["iteration"].tolist() == [0, 1, 2]
    saved = json.loads((output / "settings.json").read_text())
    assert saved["code"] == code_version("grpo_core.grpo", "grpo_core.warm_start")
    assert saved["config"] == asdict(GRPOConfig(iterations=2, prompts_per_iteration=4)) and saved["seeds"] == 1
    text = (output / "group_example.txt").read_text(encoding="utf-8")
    assert text.startswith("A group of iteration 1, seed 0, sampled at temperature 0.7.\n\nPrompt 24+48=")


def test_a_run_says_what_it_will_do_and_what_came_out(tiny_run):
    output, printed, _ = tiny_run
    before, table = printed.split("iteration  ", 1)
    assert {"2", "4", "8"} <= set(re.findall(r"\d+", before)), "iterations, prompts, completions"
    assert str(output) in before
    for row in pd.read_csv(output / "history.csv").iloc[[0, -1]].itertuples():
        assert f"{row.accuracy:.3f}" in table and f"{row.accuracy_low:.3f} to {row.accuracy_high:.3f}" in table
    for name in FILES[:-1]:
        assert str(output / name) in table
    assert "interval" in table.split("history.csv")[1], "how to read the numbers"


def test_the_progress_bar_shows_reward_accuracy_and_kl(tiny_run):
    output, _, bar = tiny_run
    last = pd.read_csv(output / "history.csv").iloc[-1]
    for name in ("reward", "accuracy", "kl"):
        assert f"{name}={last[name]:.3f}" in bar.lower()


def test_the_command_line_is_the_library(tiny_run):
    from grpo_core import train

    history = train(Addition(), warm_start(), GRPOConfig(iterations=2, prompts_per_iteration=4)).frame
    written = pd.read_csv(tiny_run[0] / "history.csv")
    for column in ("reward", "accuracy", "kl", "entropy", "grad_norm"):
        assert written[column].tolist() == pytest.approx(history[column].tolist(), rel=1e-5, nan_ok=True)


def test_several_seeds(tmp_path, capsys):
    main([*TINY, "--seeds", "2", "--seed", "5", "--output", str(tmp_path / "two")])
    printed = capsys.readouterr().out
    history = pd.read_csv(tmp_path / "two" / "history.csv")
    assert history["seed"].tolist() == [5, 5, 5, 6, 6, 6]
    runs = history.pivot(index="iteration", columns="seed", values="accuracy")
    assert runs.loc[2, 5] != runs.loc[2, 6], "two seeds, two runs"
    last = next(line for line in reversed(printed.splitlines()) if re.match(r" +2 ", line))
    half = 12.7062 * abs(runs.loc[2, 5] - runs.loc[2, 6]) / 2  # Student's t with one degree of freedom.
    mean = runs.loc[2].mean()
    shown = [float(number) for number in re.findall(r"-?\d\.\d{3}", last.replace("−", "-"))]
    assert shown[:3] == pytest.approx([mean, mean - half, mean + half], abs=6e-4)

    main([*TINY, "--seed", "6", "--output", str(tmp_path / "one")])
    alone = pd.read_csv(tmp_path / "one" / "history.csv").drop(columns="seconds")
    together = history[history["seed"] == 6].drop(columns="seconds").reset_index(drop=True)
    pd.testing.assert_frame_equal(alone, together, check_exact=True)


# Settings that cannot be


IMPOSSIBLE = [
    ("--group-size", "1"), ("--temperature", "0"), ("--temperature", "-1"), ("--clip-eps", "0"), ("--clip-eps", "1"),
    ("--clip-eps-high", "0"), ("--beta", "-0.1"), ("--beta", "nan"), ("--learning-rate", "0"), ("--learning-rate", "inf"),
    ("--iterations", "0"), ("--inner-epochs", "0"), ("--prompts-per-iteration", "0"), ("--micro-batch", "0"),
    ("--evaluate-every", "0"), ("--max-new-tokens", "0"), ("--max-new-tokens", "100"), ("--device", "nowhere"),
    ("--prompts-per-iteration", "1000000"), ("--seeds", "0"),
]  # fmt: skip


@pytest.mark.parametrize("name, value", IMPOSSIBLE, ids=map(" ".join, IMPOSSIBLE))
def test_an_impossible_setting_ends_in_one_line_before_any_file_is_written(name, value, tmp_path, capsys):
    message = refused(capsys, *TINY, name, value, "--output", tmp_path / "run")
    assert name.strip("-").replace("-", "_") in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, word", [(["--kl", "k4"], "k3"), (["--nonsense"], "--nonsense"), (["--beta", "much"], "--beta")]
)
def test_a_word_that_is_no_setting_is_explained(arguments, word, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--output", str(tmp_path / "run")])
    said = f"{end.value.code} {capsys.readouterr().err}"
    assert end.value.code not in (0, None) and word in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_real_process_ends_with_status_1_and_that_line_alone(tmp_path):
    command = [sys.executable, "-m", "grpo_core", "--group-size", "1"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 1 and run.stdout == ""
    assert re.fullmatch(r"error: .*group_size.*\n", run.stderr)


def test_a_diverged_run_says_where_and_why_and_keeps_what_it_has(tmp_path, capsys):
    output = tmp_path / "run"
    message = refused(capsys, *TINY, "--learning-rate", "1e30", "--output", output)
    assert "iteration 1" in message
    assert str(output / "checkpoints" / "seed0.pt") in message
    assert "learning_rate" in message and "1e+30" in message
    assert pd.read_csv(output / "history.csv")["iteration"].tolist() == [0]
    saved = torch.load(output / "checkpoints" / "seed0.pt", weights_only=True)
    assert len(saved["rows"]) == 1
    for name, weight in warm_start().state_dict().items():
        assert torch.equal(saved["parts"]["policy"][name], weight)


# --resume


def interrupt(monkeypatch, seed, iteration):
    """Press Ctrl-C when this iteration of this seed has been saved. The returned function takes the finger off the key."""
    from grpo_core import grpo

    def save_then_interrupt(path, config, parts, generator, rows):
        save(path, config, parts, generator, rows)
        if config.seed == seed and len(rows) == iteration + 1:
            raise KeyboardInterrupt

    save = grpo.save_checkpoint
    monkeypatch.setattr(grpo, "save_checkpoint", save_then_interrupt)
    return lambda: monkeypatch.setattr(grpo, "save_checkpoint", save)


def history_of(output):
    return pd.read_csv(output / "history.csv").drop(columns="seconds")


def test_resume_without_a_run(tmp_path, capsys):
    output = tmp_path / "none"
    assert str(output) in refused(capsys, "--resume", "--output", output)
    assert not output.exists()


@pytest.mark.parametrize("seed, iteration", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_resume_takes_the_saved_settings_and_ends_like_an_uninterrupted_run(seed, iteration, tmp_path, capsys, monkeypatch):
    arguments = [*TINY, "--seeds", "2", "--evaluate-every", "2", "--beta", "0.02"]
    main([*arguments, "--output", str(tmp_path / "whole")])
    let_go = interrupt(monkeypatch, seed, iteration)
    main([*arguments, "--output", str(tmp_path / "stopped")])
    printed = capsys.readouterr().out.splitlines()
    assert any("--resume" in line and str(tmp_path / "stopped") in line for line in printed), "how to go on"
    assert len(history_of(tmp_path / "stopped")) == 3 * seed + iteration + 1
    let_go()

    main(["--resume", "--output", str(tmp_path / "stopped")])
    pd.testing.assert_frame_equal(history_of(tmp_path / "stopped"), history_of(tmp_path / "whole"), check_exact=True)
    for name in ("group_example.txt", "settings.json"):
        assert (tmp_path / "stopped" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.fixture
def finished(tmp_path, capsys):
    main([*TINY, "--output", str(tmp_path / "run")])
    capsys.readouterr()
    return tmp_path / "run"


def test_resume_refuses_other_settings_and_leaves_the_run_as_it_was(finished, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    message = refused(capsys, "--resume", "--beta", "0.5", "--group-size", "4", "--output", finished)
    for part in ("beta", "0.08", "0.5", "group_size", "8", "4"):
        assert part in message
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    main(["--resume", "--output", str(finished)])
    assert len(history_of(finished)) == 3


def test_resume_of_a_finished_run_writes_the_same_results(finished):
    before = {name: (finished / name).read_bytes() for name in FILES}
    main(["--resume", "--output", str(finished)])
    assert {name: (finished / name).read_bytes() for name in FILES} == before


def test_resume_can_go_on_for_longer(finished, tmp_path):
    main(["--resume", "--iterations", "3", "--output", str(finished)])
    main([*TINY, "--iterations", "3", "--output", str(tmp_path / "longer")])
    pd.testing.assert_frame_equal(history_of(finished), history_of(tmp_path / "longer"), check_exact=True)


def test_resume_without_a_checkpoint_starts_over(finished):
    """A run that was killed before its first checkpoint has settings, and that is all it needs."""
    before = history_of(finished)
    (finished / "checkpoints" / "seed0.pt").unlink()
    main(["--resume", "--output", str(finished)])
    pd.testing.assert_frame_equal(history_of(finished), before, check_exact=True)


def test_a_new_run_does_not_stumble_over_an_old_one_in_its_folder(tmp_path, monkeypatch):
    output = ["--output", str(tmp_path / "run")]
    main([*TINY, "--seeds", "2", *output])
    let_go = interrupt(monkeypatch, seed=0, iteration=1)
    main([*TINY, "--seeds", "2", "--beta", "0.5", *output])
    let_go()
    main(["--resume", *output])
    assert history_of(tmp_path / "run")["seed"].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"config": {"beta": 1}}', '{"config": {"nonsense": 1}, "seeds": 1}', "\x00"]
)
def test_damaged_settings_are_refused(text, finished, capsys):
    (finished / "settings.json").write_text(text)
    assert "settings.json" in refused(capsys, "--resume", "--output", finished)


def test_a_damaged_checkpoint_is_refused(finished, capsys):
    checkpoint = finished / "checkpoints" / "seed0.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert str(checkpoint) in refused(capsys, "--resume", "--output", finished)


# warm-start


def test_warm_start_command(tmp_path, capsys):
    path = tmp_path / "new" / "policy.pt"
    main(["warm-start", "--steps", "3", "--seed", "1", "--output", str(path)])
    printed, task = capsys.readouterr().out, Addition()
    policy = warm_start(path)
    assert str(path) in printed and str(greedy_accuracy(policy, task, task.validation)) in printed
    assert not torch.equal(policy.head.weight, warm_start().head.weight)


def test_warm_start_command_cannot_write(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in refused(capsys, "warm-start", "--steps", "1", "--output", tmp_path / "file" / "policy.pt")


def test_warm_start_command_by_default_rebuilds_outside_the_package():
    from grpo_core.__main__ import WarmStart
    from grpo_core.warm_start import RECIPE, START_POLICY

    assert WarmStart().steps == RECIPE["steps"] and WarmStart().seed == RECIPE["seed"]
    assert WarmStart().output.resolve() != START_POLICY.resolve()


# Studies


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_explains_itself_and_can_be_called(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    module = importlib.import_module(f"grpo_core.studies.{name.replace('-', '_')}")
    assert text.startswith(f"usage: python -m grpo_core {name}") and module.__doc__.split(".")[0].split()[-1] in text
    assert {"--seeds", "--seed", "--output"} <= set(re.findall(r"--[a-z]+", text)) and str(module.FOLDER) in text
    assert callable(module.write) and len(module.SEEDS) >= 2


def test_a_study_gets_folder_and_seeds(monkeypatch, capsys):
    from grpo_core.studies import scoreboard

    asked = []
    monkeypatch.setattr(scoreboard, "write", lambda *arguments: asked.append(arguments) or "the table")
    main(["scoreboard", "--seeds", "2", "--seed", "7", "--output", "here"])
    assert asked == [(Path("here"), range(7, 9))]
    assert capsys.readouterr().out == "the table\nhere\n"


def test_one_seed_is_too_few_for_a_study(capsys):
    assert "at least 2" in refused(capsys, "scoreboard", "--seeds", 1)
