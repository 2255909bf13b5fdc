"""Checkpoints: whole after a kill at any moment, and a resumed run is the run that was never interrupted."""

import json
import random
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch

from grpo_core import Addition, CheckpointError, GRPOConfig, TinyGPT, train, warm_start
from grpo_core.__main__ import main
from grpo_core.checkpoint import load_checkpoint, save_checkpoint, write_atomically

SMALL = GRPOConfig(prompts_per_iteration=4, group_size=4, iterations=4, evaluate_every=2)


class FewProblems(Addition):
    """Addition, measured on few problems to save time."""

    def __init__(self):
        super().__init__()
        self.held_out = self.held_out[:20]


def weights(policy):
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def rows_of(history):
    return history.frame.drop(columns="seconds")


# Writing a file


def test_a_file_is_written_with_its_folders(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    write_atomically(path, lambda file: file.write(b"first"))
    write_atomically(path, lambda file: file.write(b"second"))
    assert path.read_bytes() == b"second"
    assert [found.name for found in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, interruption):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise interruption

    with pytest.raises(interruption):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_in_the_middle_of_a_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = """if True:
        import os, signal, sys
        from grpo_core.checkpoint import write_atomically

        def write(file):
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

        write_atomically(sys.argv[1], write)
    """
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode not in (0, 1), "it was to be killed"
    assert path.read_bytes() == b"old"


# Resuming in one process


@pytest.fixture(scope="module")
def uninterrupted():
    policy = warm_start()
    return train(FewProblems(), policy, SMALL), policy


def test_a_saved_state_comes_back_exactly(tmp_path):
    policy, generator = warm_start(), torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    rows = [{"iteration": 0, "accuracy": 1 / 3}, {"iteration": 1, "reward": float("inf")}]
    save_checkpoint(tmp_path / "a.pt", SMALL, {"policy": policy}, generator, rows)
    other, fresh = TinyGPT(len(Addition.vocab)), torch.Generator()
    assert load_checkpoint(tmp_path / "a.pt", SMALL, {"policy": other}, fresh) == rows
    assert torch.equal(weights(other), weights(policy))
    assert torch.equal(torch.rand(5, generator=fresh), torch.rand(5, generator=generator))


@pytest.mark.parametrize("stop", range(5))
def test_ctrl_c_and_resume_equals_an_uninterrupted_run(stop, uninterrupted, tmp_path):
    def press_ctrl_c(row, rollout):
        if row["iteration"] == stop:
            raise KeyboardInterrupt

    policy, path = warm_start(), tmp_path / "run.pt"
    stopped = train(FewProblems(), policy, SMALL, on_iteration=press_ctrl_c, checkpoint=path)
    assert len(stopped.rows) <= stop + 1
    resumed_policy = warm_start()
    resumed = train(FewProblems(), resumed_policy, SMALL, checkpoint=path, resume=path.exists())
    pd.testing.assert_frame_equal(rows_of(resumed), rows_of(uninterrupted[0]), check_exact=True)
    assert torch.equal(weights(resumed_policy), weights(uninterrupted[1]))


def test_resume_takes_weights_and_reference_from_the_file(uninterrupted, tmp_path):
    """Whatever policy of the same shape is handed in: it is the container."""
    path = tmp_path / "run.pt"
    train(FewProblems(), warm_start(), SMALL, checkpoint=path, should_stop=once_after(3))
    policy = TinyGPT(len(Addition.vocab))
    resumed = train(FewProblems(), policy, SMALL, checkpoint=path, resume=True)
    pd.testing.assert_frame_equal(rows_of(resumed), rows_of(uninterrupted[0]), check_exact=True)
    assert torch.equal(weights(policy), weights(uninterrupted[1]))


def once_after(calls):
    """A `should_stop` that is true from its call number `calls` on."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_a_finished_run_can_go_on(uninterrupted, tmp_path):
    path = tmp_path / "run.pt"
    policy = warm_start()
    train(FewProblems(), policy, GRPOConfig(**vars(SMALL) | {"iterations": 2}), checkpoint=path)
    longer = train(FewProblems(), policy, SMALL, checkpoint=path, resume=True)
    pd.testing.assert_frame_equal(rows_of(longer), rows_of(uninterrupted[0]), check_exact=True)


# Refusals


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.pt"
    train(FewProblems(), warm_start(), GRPOConfig(**vars(SMALL) | {"iterations": 1}), checkpoint=path)
    return path


def refusal(path, policy=None, **changed):
    with pytest.raises(CheckpointError) as caught:
        train(FewProblems(), policy or warm_start(), GRPOConfig(**vars(SMALL) | changed), checkpoint=path, resume=True)
    message = str(caught.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1, message
    return message


def test_other_settings_are_refused_with_each_name_and_both_values(saved):
    message = refusal(saved, beta=0.25, group_size=6, kl="k1", clip_eps_high=0.28)
    for name, there, here in [
        ("beta", 0.08, 0.25),
        ("group_size", 4, 6),
        ("kl", "'k3'", "'k1'"),
        ("clip_eps_high", None, 0.28),
    ]:
        about = message[message.index(f"{name} ") :].split(",")[0]
        assert str(there) in about and str(here) in about, message
    for same in ("temperature", "seed", "iterations", "aggregation"):
        assert f"{same} is" not in message


@pytest.mark.parametrize("field", sorted(set(vars(SMALL)) - {"iterations"}))
def test_every_setting_but_the_number_of_iterations_is_compared(field, tmp_path):
    path, generator = tmp_path / "run.pt", torch.Generator()
    save_checkpoint(path, SMALL, {}, generator, [])
    here = GRPOConfig(**vars(SMALL))
    object.__setattr__(here, field, "another")
    with pytest.raises(CheckpointError, match=f"{field} .*another"):
        load_checkpoint(path, here, {}, generator)


def test_a_policy_of_another_shape_is_refused(saved):
    for policy in (TinyGPT(13, width=32), TinyGPT(13, layers=3), TinyGPT(14)):
        refusal(saved, policy)


def test_a_missing_checkpoint_is_refused(tmp_path):
    refusal(tmp_path / "none.pt")


def test_a_damaged_checkpoint_is_refused(saved):
    good = saved.read_bytes()
    middle = len(good) // 2
    flipped = good[:middle] + bytes(255 - byte for byte in good[middle : middle + 64]) + good[middle + 64 :]
    for damaged in (b"", good[:middle], good[:-1], random.Random(0).randbytes(5000), flipped):
        saved.write_bytes(damaged)
        refusal(saved)


def test_a_foreign_checkpoint_is_refused(saved):
    for foreign in (torch.ones(3), None, {"format": "of another program"}, warm_start().state_dict()):
        torch.save(foreign, saved)
        refusal(saved)


def test_a_checkpoint_that_lost_a_part_is_refused(saved):
    whole = torch.load(saved, weights_only=True)
    for part in whole:
        torch.save({name: value for name, value in whole.items() if name != part}, saved)
        refusal(saved)


@pytest.mark.parametrize("place", ["the folder", "its parent", "the folder of checkpoints"])
def test_output_that_cannot_be_written_is_refused_before_training(place, tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("training began")

    monkeypatch.setattr("grpo_core.__main__.train", never)
    output = tmp_path / "file"
    if place == "the folder of checkpoints":
        output.mkdir()
        (output / "checkpoints").write_text("")
    else:
        output.write_text("")
    with pytest.raises(SystemExit) as end:
        main(["--iterations", "1", "--output", str(output / "inside" if place == "its parent" else output)])
    message = end.value.code  # A string is printed, and is exit status 1.
    assert isinstance(message, str) and len(message.splitlines()) == 1 and str(output) in message


# Killing a real run, again and again

ITERATIONS = 12
FINAL = ["settings.json", "history.csv", "group_example.txt", "grpo_accuracy.png", "grpo_kl.png", "checkpoints"]


class LiveRun:
    """`python -m grpo_core` in a process of its own."""

    def __init__(self, output, *flags):
        self.output, self.checkpoint = output, output / "checkpoints" / "seed0.pt"
        self.settings, self.report = output / "settings.json", output / "history.csv"
        command = [sys.executable, "-m", "grpo_core", "--output", str(output), *flags]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def wait_for(self, path, times):
        """Until `path` has been written so many times; how long that took since the start, in seconds."""
        versions = set()
        while len(versions) <= times and self.process.poll() is None:
            versions.add(path.stat().st_mtime_ns if path.exists() else None)
            time.sleep(0.002)
        return time.monotonic() - self.began

    def kill_after(self, delay):
        time.sleep(delay)
        self.process.kill()
        self.process.communicate()

    def finish(self):
        assert self.process.wait() == 0, self.process.stderr.read()
        return time.monotonic() - self.began


def start(output):
    """A new run, or the continuation of the one that was killed."""
    if (output / "settings.json").exists():
        return LiveRun(output, "--resume")
    return LiveRun(output, "--iterations", str(ITERATIONS))


def check_whole(output):
    """Nothing half-written under a final name; how many rows of the history are saved."""
    if not output.exists():
        return 0
    assert {path.name for path in output.iterdir() if not path.name.startswith(".")} <= set(FINAL)
    for path in output.glob("*.json"):
        assert json.loads(path.read_text())["config"]["iterations"] == ITERATIONS
    for path in output.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.read_bytes()[-8:-4] == b"IEND"
    for path in output.glob("*.csv"):
        assert path.read_text().endswith("\n") and len(set(map(len, map(columns, path.read_text().splitlines())))) == 1
    for path in output.glob("*.txt"):
        assert path.read_text().count("|\n") == 4
    saved = [torch.load(path, weights_only=True) for path in output.glob("checkpoints/*.pt")]
    assert all(len(state["rows"]) > 0 and set(state["parts"]) >= {"policy", "optimizer"} for state in saved)
    return max([len(state["rows"]) for state in saved], default=0)


def columns(line):
    return line.split(",")


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(tmp_path):
    chance = random.Random(0)
    whole = LiveRun(tmp_path / "whole", "--iterations", str(ITERATIONS))
    starting = whole.wait_for(whole.settings, 1)
    whole.finish()

    output = tmp_path / "killed"
    training = [("checkpoint", 1), ("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3)]
    moments = [("start",), ("settings", 1), ("start",), *training, ("report", 1)]
    saved = []
    for name, *times in moments:
        run = start(output)
        if name == "start":
            run.kill_after(chance.uniform(0, 0.8 * starting))
        else:
            run.wait_for(getattr(run, name), *times)
            run.kill_after(chance.uniform(0, 0.1))
        saved.append(check_whole(output))
    assert len(saved) >= 8 and saved == sorted(saved)
    assert saved[0] == 0 and saved[-1] == ITERATIONS + 1
    assert len({rows for rows in saved if 0 < rows <= ITERATIONS}) >= 3, "these kills were to land during training"

    start(output).finish()
    assert check_whole(output) == ITERATIONS + 1
    same_run(output, tmp_path / "whole")


def same_run(one, other):
    """The same history but for the times, the same weights, the same worked group."""
    histories = [pd.read_csv(folder / "history.csv").drop(columns="seconds") for folder in (one, other)]
    pd.testing.assert_frame_equal(*histories, check_exact=True)
    states = [torch.load(folder / "checkpoints" / "seed0.pt", weights_only=True) for folder in (one, other)]
    for part in ("policy", "reference"):
        for name, weight in states[0]["parts"][part].items():
            assert torch.equal(weight, states[1]["parts"][part][name]), name
    assert (one / "group_example.txt").read_text() == (other / "group_example.txt").read_text()
