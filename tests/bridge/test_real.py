"""`python -m grpo_core real`, from --help to the saved model, on a random Llama and a small file of problems."""

import importlib
import json
import re
import shutil
from dataclasses import asdict, fields
from itertools import product
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

pytest.importorskip("transformers")
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_core import CheckpointError, GRPOConfig, Problem, Rollout, TrainingDiverged
from grpo_core.bridge import real, real_report
from grpo_core.bridge.causal_lm import CausalLM, load
from grpo_core.bridge.text_task import TextTask
from grpo_core.checkpoint import read_file
from grpo_core.history import COLUMNS

FILES = ["completions.jsonl", "group_example.txt", "history.csv", "learning.png", "settings.json"]
SMALL = [
    "--iterations", "3", "--prompts-per-iteration", "2", "--group-size", "4", "--max-new-tokens", "6", "--evaluate-every", "2",
    "--micro-batch", "None", "--learning-rate", "0.01", "--held-out-problems", "7", "--instruction", "",
    "--device", "cpu", "--no-bf16",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a random Llama that reads single characters, and a file of problems."""
    folder = tmp_path_factory.mktemp("source")
    records = [{"question": f"{a} and {b}", "answer": f"#### {a + b}"} for a, b in product(range(1, 11), range(12))]
    (folder / "problems.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["<|end|>", *sorted(set("\n 0123456789Question:Answer:and"))]
    characters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=words[0])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=40, initializer_range=0.3, bos_token_id=None, eos_token_id=0,
        )
    )  # fmt: skip
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module", autouse=True)
def rewards_that_a_random_model_earns():
    """Without any reward nothing would move."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTask, "verify", lambda self, text, answer: float(sum(map(str.isdigit, text)) % 2))
        yield


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """An empty folder; and without what takes longest and is tested on the finished run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(real, "learning_figure", lambda *_: Figure((1, 1)))
    monkeypatch.setattr(real, "code_version", lambda *_: "")


def start(source, output, *more):
    settings = ["--model", str(source / "model"), "--data", str(source / "problems.jsonl"), "--output", str(output)]
    real.main("real", *SMALL, *settings, *more)
    return output


def history_of(output):
    return pd.read_csv(output / "history.csv").drop(columns="seconds")


def completions_of(output):
    return pd.read_json(output / "completions.jsonl", lines=True, dtype=False)


# A run


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """A run, once: its folder and what it printed."""
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        output = start(source, tmp_path_factory.mktemp("run") / "results")
    return output, "\n".join(printed)


def test_a_run_writes_its_files(finished):
    output, _ = finished
    folders = {"checkpoints", "model"} | ({"tensorboard"} if importlib.util.find_spec("tensorboard") else set())
    assert {path.name for path in output.iterdir()} == {*FILES, *folders}
    history = pd.read_csv(output / "history.csv")
    assert list(history.columns) == ["seed", *COLUMNS] and history["iteration"].tolist() == [0, 1, 2, 3]
    assert history["accuracy"].notna().tolist() == [True, False, True, True]
    assert history["kl"].iloc[-1] > 0 and (history["grad_norm"].iloc[1:] > 0).any()
    assert (output / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_settings_say_what_was_run(finished, source):
    saved = json.loads((finished[0] / "settings.json").read_text())
    assert saved["model"] == str(source / "model") and saved["data"] == str(source / "problems.jsonl")
    assert saved["instruction"] == "" and saved["held_out_problems"] == 7
    assert saved["versions"]["torch"] == torch.__version__ and re.fullmatch("[0-9a-f]{12}", saved["code"])
    assert saved["config"] == asdict(real.default_config()) | {
        "iterations": 3, "prompts_per_iteration": 2, "group_size": 4, "max_new_tokens": 6, "evaluate_every": 2,
        "micro_batch": None, "learning_rate": 0.01,
    }  # fmt: skip


def test_completions_are_those_that_transformers_finds(finished, source):
    """Start and trained model, reloaded by the library alone; its own generate, one prompt at a time."""
    output, _ = finished
    table, history = completions_of(output), history_of(output)
    assert len(table) == 7 and (table["start"] != table["trained"]).any()
    for name, folder, row in [("start", source / "model", 0), ("trained", output / "model", -1)]:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        for question, text in zip(table["question"], table[name]):
            ids = tokenizer(f"Question: {question}\nAnswer:", return_tensors="pt")["input_ids"]
            made = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)[0, ids.shape[1] :]
            assert tokenizer.decode(made) == text
        assert history["accuracy"].iloc[row] == pytest.approx(table[f"{name}_reward"].mean(), abs=1e-6)


def test_saved_model_is_the_trained_policy(finished, source):
    output, _ = finished
    policy, _ = load(str(source / "model"))
    ids = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(0))
    before = policy(ids)
    policy.load_state_dict(read_file(output / "checkpoints" / "real.pt")["parts"]["policy"])
    saved = CausalLM(AutoModelForCausalLM.from_pretrained(output / "model"))
    torch.testing.assert_close(saved(ids), policy(ids), rtol=0, atol=0)
    assert (saved(ids) - before).abs().max() > 0.01


def test_a_run_says_what_it_will_do_and_what_came_out(finished, source):
    output, printed = finished
    before, table = printed.split("iteration  ", 1)
    assert str(source / "model") in before and str(output) in before
    assert {"3", "2", "4", "7"} <= set(re.findall(r"\d+", before)), "iterations, prompts, completions, problems"
    history = pd.read_csv(output / "history.csv")
    for row in history.iloc[[0, 2, 3]].itertuples():
        assert f"{row.accuracy:.3f}" in table and f"{row.accuracy_low:.3f} to {row.accuracy_high:.3f}" in table
    for name in FILES[:-1]:
        assert str(output / name) in table
    change = completions_of(output).eval("trained_reward - start_reward")
    words = f"{(change > 0).sum()} became right and {(change < 0).sum()} became wrong: accuracy {change.mean():+.3f}"
    assert words.replace("-", "−") in table and "chance" in table


def test_group_page_shows_prompt_rewards_and_advantages(finished, source):
    text = (finished[0] / "group_example.txt").read_text(encoding="utf-8")
    head, *completions = text.split("--- completion ")
    assert head.startswith("A group of iteration 1, seed 0, sampled at temperature 1.\n")
    first, second, answer = map(int, re.search(r"answer: (\d+).*: (\d+) and (\d+)\nAnswer:", head, re.DOTALL).group(2, 3, 1))
    assert first + second == answer
    rows = [re.match(r"(\d): reward (.*), advantage (.*)\n", part).groups() for part in completions]
    assert [int(number) for number, _, _ in rows] == [1, 2, 3, 4]
    rewards = torch.tensor([float(reward) for _, reward, _ in rows])
    expected = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    shown = torch.tensor([float(advantage.replace("−", "-")) for _, _, advantage in rows])
    torch.testing.assert_close(shown, expected, rtol=0, atol=6e-4)
    assert rewards.std() > 0, "a group from which something is learned"


def test_the_page_takes_the_first_group_whose_rewards_differ():
    class Task:
        tokenizer = SimpleNamespace(decode="|".join)
        encode = list

    problems = [Problem("ab", "1"), Problem("cd", "2"), Problem("ef", "3")]
    rewards, texts = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), list("uvwxyz")
    rollout = Rollout(*[torch.zeros(6, 1)] * 4, rewards=rewards, temperature=1.0, texts=texts, problems=problems)
    page = real_report.group_page(rollout, Task(), GRPOConfig(scale="none"))
    assert "True answer: 2" in page and "c|d" in page
    assert "reward 1, advantage +0.500\nw\n" in page and "reward 0, advantage −0.500\nx\n" in page


def test_tensorboard_has_each_number_of_the_history(finished):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(finished[0] / "tensorboard")).Reload()
    history = pd.read_csv(finished[0] / "history.csv").set_index("iteration").drop(columns="seed")
    assert set(events.Tags()["scalars"]) == set(history.columns)
    for name in history:
        column = history[name].dropna()
        logged = events.Scalars(name)
        assert [event.step for event in logged] == column.index.tolist()
        assert [event.value for event in logged] == pytest.approx(column.tolist(), rel=1e-5)


def test_without_tensorboard_there_is_only_the_history(tmp_path, monkeypatch):
    monkeypatch.setattr(real_report.importlib.util, "find_spec", lambda name: None)
    with real_report.scalars(tmp_path / "tensorboard") as log:
        log({"iteration": 0, "reward": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_adapter_is_trained_and_saved_alone(source, tmp_path):
    peft = pytest.importorskip("peft")
    output = start(source, tmp_path / "run", "--lora-rank", "2", "--beta", "0", "--iterations", "1", "--learning-rate", "0.1")
    assert (output / "model" / "adapter_config.json").exists() and not (output / "model" / "model.safetensors").exists()
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(output / "model")
    policy, _ = load(str(source / "model"), lora_rank=2)
    ids = torch.arange(18).view(2, 9)
    before = policy(ids)
    policy.load_state_dict(read_file(output / "checkpoints" / "real.pt")["parts"]["policy"])
    torch.testing.assert_close(CausalLM(adapted)(ids), policy(ids), rtol=0, atol=1e-6)
    assert (policy(ids) - before).abs().max() > 0.01
    assert history_of(output)["kl"].notna().iloc[1], "with an adapter the distance can be measured for nothing"


# What cannot be


def refused(folder, *arguments, error=ValueError):
    """What is said before anything is written."""
    with pytest.raises(error) as raised:
        real.main("real", *map(str, arguments))
    assert not folder.exists()
    return str(raised.value)


IMPOSSIBLE = [
    ("--lora-rank", "-1"), ("--rows-at-once", "0"), ("--held-out-problems", "-1"), ("--checkpoint-every", "0"),
    ("--group-size", "1"), ("--temperature", "0"), ("--prompts-per-iteration", "1000"), ("--device", "nowhere"),
]  # fmt: skip


@pytest.mark.parametrize("name, value", IMPOSSIBLE, ids=map(" ".join, IMPOSSIBLE))
def test_an_impossible_setting_is_refused_before_the_model_is_loaded(name, value, source, tmp_path, monkeypatch):
    monkeypatch.setattr(real, "load", None)
    arguments = "--model", "m", "--data", source / "problems.jsonl", "--output", tmp_path / "run"
    assert name.strip("-").replace("-", "_") in refused(tmp_path / "run", *arguments, name, value)


def test_without_a_model_nothing_begins(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        real.main("real", "--output", str(tmp_path / "run"))
    assert end.value.code not in (0, None) and "--model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_had(source, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--data", source / "problems.jsonl", "--output", tmp_path / "run"
    assert "hf download Qwen/Qwen2.5-0.5B-Instruct" in refused(tmp_path / "run", *arguments)


def test_the_command_ends_in_one_line(source, tmp_path, monkeypatch):
    from grpo_core.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(["real", "--model", "no/model", "--data", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "run")])
    assert re.fullmatch(r"error: there is no file .*none\.jsonl.*", end.value.code) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("text, word", [(None, "missing.jsonl"), ('{"question": "1 and 1"}\n', "1"), ("", "problems")])
def test_data_that_cannot_be_used(text, word, tmp_path, monkeypatch):
    monkeypatch.setattr(real, "load", None)
    path = tmp_path / "missing.jsonl"
    if text is not None:
        path = tmp_path / "problems.jsonl"
        path.write_text(text)
    assert word in refused(tmp_path / "run", "--model", "m", "--data", path, "--output", tmp_path / "run")


LONG = Problem("1 and 1" + " " * 30, "2")


def test_long_training_prompts_are_left_out_and_counted(source, tmp_path, monkeypatch, capsys):
    splits = real.load_problems(str(source / "problems.jsonl"))
    monkeypatch.setattr(real, "load_problems", lambda _: splits._replace(train=[LONG, *splits.train[:5], LONG]))
    start(source, tmp_path / "run", "--iterations", "1")
    assert re.search(r"on 5 problems .* 2 more are left out", capsys.readouterr().out)


@pytest.mark.parametrize(
    "part, words", [("held_out", "1 of the held_out problems and 0"), ("train", "0 of the held_out .* and 2")]
)
def test_prompts_that_cannot_be_left_out_are_refused(part, words, source, tmp_path, monkeypatch):
    """Of two prompts in an iteration none can be spared; and an accuracy without the long problems would be another one."""
    splits = real.load_problems(str(source / "problems.jsonl"))
    few = {"train": splits.train[:2], "held_out": splits.held_out[:2]}
    few[part] = [LONG, few[part][0]] if part == "held_out" else [LONG, LONG]
    monkeypatch.setattr(real, "load_problems", lambda _: splits._replace(**few))
    message = refused(tmp_path / "run", *SMALL, "--model", source / "model", "--data", "d", "--output", tmp_path / "run")
    assert re.match(rf"max_new_tokens 6 is too large: {words} of the 2 training .* 40 tokens", message)


def test_a_diverged_run_keeps_what_it_has(source, tmp_path, capsys):
    with pytest.raises(TrainingDiverged, match=r"iteration 1 .*real\.pt"):
        start(source, tmp_path / "run", "--learning-rate", "1e30")
    assert history_of(tmp_path / "run")["iteration"].tolist() == [0]
    assert "start a new one" in capsys.readouterr().out and not (tmp_path / "run" / "model").exists()


# --resume


def interrupt(monkeypatch, iteration):
    """Press Ctrl-C once, when this iteration is on disk, and before its checkpoint is."""
    write = real.write_history

    def write_then_interrupt(settings, history):
        frame = write(settings, history)
        if history.rows[-1]["iteration"] == iteration:
            monkeypatch.setattr(real, "write_history", write)
            raise KeyboardInterrupt
        return frame

    monkeypatch.setattr(real, "write_history", write_then_interrupt)


@pytest.mark.parametrize("iteration, every, more", [(0, 1, []), (2, 3, []), (2, 1, ["--lora-rank", "2"])])
def test_resume_ends_like_an_uninterrupted_run(iteration, every, more, source, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    arguments = ["--checkpoint-every", str(every), *more]
    whole = start(source, tmp_path / "whole", *arguments)
    interrupt(monkeypatch, iteration)
    stopped = start(source, tmp_path / "stopped", *arguments)
    printed = capsys.readouterr().out
    assert f"python -m grpo_core real --output {stopped} --resume" in printed.splitlines()[-1]
    assert history_of(stopped)["iteration"].tolist() == list(range(iteration + 1)), "written after each iteration"
    if every == 3:
        assert len(read_file(stopped / "checkpoints" / "real.pt")["rows"]) == 1, "written as seldom as asked for"
    assert not (stopped / "model").exists()

    real.main("real", "--resume", "--output", str(stopped))
    pd.testing.assert_frame_equal(history_of(stopped), history_of(whole), check_exact=True)
    weights = "adapter_model.safetensors" if more else "model.safetensors"
    for name in ("completions.jsonl", "group_example.txt", "settings.json", f"model/{weights}"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()


def test_after_each_iteration_the_whole_run_is_on_disk(source, tmp_path, monkeypatch):
    """Iterations behind the checkpoint come a second time; in the files they replace the first."""
    interrupt(monkeypatch, 2)
    output = start(source, tmp_path / "run", "--checkpoint-every", "1")
    before, on_disk = history_of(output), []
    write = real.write_history

    def write_and_look(settings, history):
        frame = write(settings, history)
        on_disk.append(history_of(output))
        return frame

    monkeypatch.setattr(real, "write_history", write_and_look)
    real.main("real", "--resume", "--output", str(output))
    pd.testing.assert_frame_equal(on_disk[0], before, check_exact=True)
    assert [table["iteration"].tolist() for table in on_disk] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    pd.testing.assert_frame_equal(on_disk[1], on_disk[2], check_exact=True)
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(output / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3]


@pytest.fixture
def stopped(source, tmp_path, monkeypatch):
    interrupt(monkeypatch, 1)
    return start(source, tmp_path / "run", "--checkpoint-every", "1")


def test_resume_refuses_other_settings(stopped):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as raised:
        real.main("real", "--resume", "--output", str(stopped), "--beta", "0.5", "--instruction", "Think.", "--model", "m")
    for part in ("beta", "0.001", "0.5", "instruction", "Think.", "model", "'m'"):
        assert part in str(raised.value)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_what_saves_memory_may_change(stopped):
    real.main("real", "--resume", "--output", str(stopped), "--rows-at-once", "4", "--gradient-checkpointing")
    assert history_of(stopped)["iteration"].tolist() == [0, 1, 2, 3]
    assert json.loads((stopped / "settings.json").read_text())["rows_at_once"] == 4


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"config": {"nonsense": 1}}', "\x00"])
def test_damaged_settings_are_refused(text, tmp_path):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"settings\.json is damaged"):
        real.main("real", "--resume", "--output", str(tmp_path))


def test_there_is_no_run_to_resume(tmp_path):
    assert "settings.json" in refused(tmp_path / "run", "--resume", "--output", tmp_path / "run", error=CheckpointError)


def test_a_new_run_does_not_stumble_over_an_old_one_in_its_folder(stopped, source, monkeypatch):
    interrupt(monkeypatch, 0)
    start(source, stopped, "--seed", "1", "--iterations", "1")
    real.main("real", "--resume", "--output", str(stopped))
    assert history_of(stopped)["seed"].tolist() == [1, 1]
    assert len(read_file(stopped / "checkpoints" / "real.pt")["rows"]) == 2


def test_a_trained_model_is_not_overwritten(finished, source, tmp_path):
    output = shutil.copytree(finished[0], tmp_path / "run")
    with pytest.raises(ValueError, match="model of an earlier run: give another --output"):
        start(source, output)
    before = {path: path.read_bytes() for path in output.rglob("*.*") if path.parent.name != "tensorboard"}
    del before[output / "learning.png"]  # Not drawn here, see `quick`.
    saved = before.pop(output / "settings.json")
    real.main("real", "--resume", "--output", str(output))
    assert {path: path.read_bytes() for path in before} == before, "a finished run is only reported again"
    assert json.loads((output / "settings.json").read_bytes()) == json.loads(saved) | {"code": ""}


def test_ctrl_c_while_measuring_says_how_to_go_on(source, tmp_path, monkeypatch):
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(real, "greedy_texts", press)
    with pytest.raises(SystemExit) as end:
        start(source, tmp_path / "run")
    assert "--resume" in end.value.code and str(tmp_path / "run") in end.value.code


# Chance


@pytest.mark.parametrize("better, worse", list(product(range(5), range(5))))
def test_sign_test_counts_all_throws_of_a_coin(better, worse):
    throws = list(product([0, 1], repeat=better + worse))
    uneven = [row for row in throws if abs(2 * sum(row) - len(row)) >= abs(better - worse)]
    assert real_report.sign_test(better, worse) == pytest.approx(len(uneven) / len(throws))


@pytest.mark.parametrize("better, worse, clear", [(6, 0, True), (0, 6, True), (5, 0, False), (30, 22, False), (40, 20, True)])
def test_a_change_is_called_what_it_is(better, worse, clear):
    before = [0.0] * better + [1.0] * worse + [1.0] * 50 + [0.0] * 50
    after = [1.0] * better + [0.0] * worse + [1.0] * 50 + [0.0] * 50
    text = real_report.describe_change(before, after)
    assert f"{better} became right and {worse} became wrong" in text
    assert ("more than chance" in text, "may be chance" in text) == (clear, not clear)
    assert f"{(better - worse) / len(before):+.3f}".replace("-", "−") in text


# --help


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as end:
        real.main("real", "--help")
    assert not end.value.code
    lines = [line.strip("│╭╮╰╯ ") for line in capsys.readouterr().out.splitlines()]
    flags = re.split(r"(?m)^(--[a-z0-9-]+)", "\n".join(lines))
    about = {name: " ".join(text.split()) for name, text in zip(flags[1::2], flags[2::2])}
    texts = []
    for name in [field.name for kind in (real.RealRun, GRPOConfig) for field in fields(kind) if field.name != "config"]:
        explanation = re.fullmatch(r"(?:, --no-)?\S+ (.*) \((?:default: .*|required)\)", about["--" + name.replace("_", "-")])[
            1
        ]
        assert len(explanation.split()) >= 4, f"{name}: {explanation!r}"
        texts.append(explanation)
    assert len(set(texts)) == len(texts), "two flags share one explanation: one of the fields has no comment"


def test_the_same_problems_from_all_over_are_measured_each_time():
    problems = [Problem(str(i), "1") for i in range(100)]
    some = real.pick(problems, 20)
    assert some == real.pick(problems, 20) and len(set(some)) == 20 and max(int(p.prompt) for p in some) > 50
    assert real.pick(problems, 0) == real.pick(problems, 100) == real.pick(problems, 500) == problems
