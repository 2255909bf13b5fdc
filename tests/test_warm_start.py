"""The start policy: what is shipped, how it is rebuilt, and that no other file passes for it."""

import io
import pickle
import random
from pathlib import Path

import pytest
import torch

from grpo_core import Addition, CheckpointError, TinyGPT, greedy_accuracy, warm_start
from grpo_core.warm_start import IGNORE, RECIPE, START_POLICY, answer_loss, fine_tune, save_policy


@pytest.fixture(scope="module")
def rebuilt():
    return fine_tune(Addition(), **RECIPE)


def weights(policy):
    buffer = io.BytesIO()
    torch.save(policy.state_dict(), buffer)
    return buffer.getvalue()


def validation_loss(policy, task):
    prompts = torch.tensor([task.encode(problem.prompt) for problem in task.validation])
    answers = [task.encode(problem.answer) + [task.eos_id] for problem in task.validation]
    targets = torch.tensor([(answer + 3 * [IGNORE])[:4] for answer in answers])
    with torch.no_grad():
        return answer_loss(policy, prompts, targets).item()


# What is shipped


def test_shipped_policy_is_right_on_36_percent_of_the_held_out_problems():
    task = Addition()
    assert len(task.held_out) == 400
    assert greedy_accuracy(warm_start(), task, task.held_out).value == pytest.approx(0.36, abs=0.02)


def test_each_call_gives_a_policy_of_its_own():
    first, second = warm_start(), warm_start()
    with torch.no_grad():
        first.head.bias.add_(1)
    assert not torch.equal(first.head.bias, second.head.bias)


def test_a_saved_policy_comes_back_the_same_and_with_the_same_bytes(tmp_path):
    save_policy(warm_start(), tmp_path / "a.pt")
    save_policy(warm_start(tmp_path / "a.pt"), tmp_path / "b.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes() == START_POLICY.read_bytes()


# How it is rebuilt


def test_two_rebuilds_give_the_same_file(rebuilt, tmp_path):
    torch.rand(7)  # Whatever ran before in the process must not matter.
    save_policy(rebuilt, tmp_path / "a.pt")
    save_policy(fine_tune(Addition(), **RECIPE), tmp_path / "b.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_another_seed_gives_another_policy():
    assert weights(fine_tune(Addition(), steps=1, seed=0)) != weights(fine_tune(Addition(), steps=1, seed=1))


def test_first_steps_follow_the_recipe_on_every_processor():
    """Weights perturbed by one rounding step changed none of these digits, so they pin seed, batches and step size."""
    task = Addition()
    losses = [validation_loss(fine_tune(task, **RECIPE | {"steps": steps}), task) for steps in (0, 20, 50)]
    assert losses == pytest.approx([2.57735, 1.53042, 1.33107], abs=1e-4)


def test_rebuild_is_the_shipped_file_or_as_good_as_rounding_allows(rebuilt, tmp_path):
    """The same file where the processor rounds as that of the shipped one did.

    Elsewhere it cannot be: weights perturbed by one rounding step end, 484 steps later, at losses from 0.34 to 0.54.
    After 300 steps the loss is 0.89, after 700 it is 0.22; so the range still tells a wrong recipe.
    """
    save_policy(rebuilt, tmp_path / "rebuilt.pt")
    same = (tmp_path / "rebuilt.pt").read_bytes() == START_POLICY.read_bytes()
    assert same or 0.25 < validation_loss(rebuilt, Addition()) < 0.65


def test_fine_tuning_never_reads_a_problem_that_is_only_for_measuring():
    class Watched(Addition):
        seen = ()

        def encode(self, text):
            self.seen = {*self.seen, text}
            return super().encode(text)

    task = Watched()
    fine_tune(task, steps=2)
    kept_back = {problem.prompt for problem in task.held_out + task.validation}
    swapped = {"{1}+{0}=".format(*prompt.rstrip("=").split("+")) for prompt in kept_back}
    assert len(kept_back) == 800
    assert task.seen.isdisjoint(kept_back | swapped)
    assert {problem.prompt for problem in task.train} <= task.seen


def test_the_result_does_not_depend_on_the_global_generator():
    results = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.add(weights(fine_tune(Addition(), steps=1)))
    assert len(results) == 1


# No other file passes for it


class Intruder:
    """Unpickled without care, it makes the file `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def saved(thing) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(255 - byte for byte in data[middle : middle + 64]) + data[middle + 64 :]


GOOD = START_POLICY.read_bytes()
FOREIGN = {
    "empty": b"",
    "cut in half": GOOD[: len(GOOD) // 2],
    "last byte lost": GOOD[:-1],
    "first bytes only": GOOD[:100],
    "damaged in the middle": flipped(GOOD),
    "random bytes": random.Random(0).randbytes(5000),
    "text": b"no weights in here\n",
    "a tensor": saved(torch.ones(3)),
    "a list": saved([1, 2]),
    "nothing": saved(None),
    "numbers for weights": saved(dict.fromkeys(warm_start().state_dict(), 1)),
    "a narrower policy": saved(TinyGPT(13, width=32).state_dict()),
    "a deeper policy": saved(TinyGPT(13, layers=3).state_dict()),
    "another vocabulary": saved(TinyGPT(14).state_dict()),
    "another model": saved(torch.nn.Linear(2, 2).state_dict()),
    "a whole module": saved(torch.nn.Linear(2, 2)),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_damaged_or_foreign_file_is_refused_in_one_line(data, tmp_path):
    path = tmp_path / "policy.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refusal:
        warm_start(path)
    message = str(refusal.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1
    assert "weights_only" not in message, "torch's own advice is to switch its protection off"


def test_a_missing_file_and_a_folder_are_refused_in_words(tmp_path):
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(CheckpointError) as refusal:
            warm_start(path)
        assert str(path) in str(refusal.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "pack", [pickle.dumps, saved, lambda thing: saved({"head.bias": thing})], ids=["plain", "torch", "inside"]
)
def test_code_in_a_file_does_not_run(pack, tmp_path):
    path, trace = tmp_path / "policy.pt", tmp_path / "trace"
    path.write_bytes(pack(Intruder(trace)))
    with pytest.raises(CheckpointError):
        warm_start(path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if pack is not pickle.dumps else pickle.loads(path.read_bytes())
    assert trace.exists(), "the trap itself must work, or this test says nothing"
