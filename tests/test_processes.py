"""Several processes take the step of one: gradients, weights, metrics. And when one dies, nothing that was computed is lost."""

import copy
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch
import torch.multiprocessing

import grpo_core.__main__ as command
from grpo_core import Addition, GRPOConfig, Rollout, greedy_accuracy, grpo_update, processes, sample_groups, train, warm_start
from grpo_core.checkpoint import read_file
from grpo_core.history import describe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked here, which is safe on Linux only")
CONFIG = GRPOConfig(beta=0.1, max_grad_norm=0.5, learning_rate=1e-3, prompts_per_iteration=7, iterations=2)
SETTINGS = [
    CONFIG,
    replace(CONFIG, aggregation="sequence"),
    replace(CONFIG, aggregation="constant", micro_batch=9),
    replace(CONFIG, micro_batch=5, inner_epochs=3),
]


def part(rollout, groups):
    """The rollout of some of the groups: a slice of them."""
    size = rollout.group_size
    rows = slice(groups.start * size, groups.stop * size)
    tensors = {
        name: getattr(rollout, name)[rows] for name in ("prompt_ids", "completion_ids", "completion_mask", "old_log_probs")
    }
    mask = None if rollout.prompt_mask is None else rollout.prompt_mask[rows]
    return Rollout(**tensors, rewards=rollout.rewards[groups], temperature=rollout.temperature, prompt_mask=mask)


def steps(rollout, settings):
    """Weights and metrics after `grpo_update`, as one of the processes; the reference is not the policy, so the leash pulls."""
    results = []
    for config in settings:
        policy, reference = warm_start().double(), warm_start().double()
        with torch.no_grad():
            reference.head.bias.add_(torch.linspace(-0.5, 0.5, 13))
        optimizer = torch.optim.SGD(policy.parameters(), lr=config.learning_rate)
        metrics = grpo_update(policy, reference, optimizer, rollout, config)
        results.append((policy.state_dict(), metrics))
    return results, describe(rollout, Addition.eos_id)


@pytest.fixture(scope="module")
def rollout():
    """Seven groups, so that no number of processes divides them; lengths differ a lot between the groups."""
    task, policy = Addition(), warm_start().double()
    problems = sorted(task.train[::400][:6], key=lambda problem: len(problem.answer)) + [task.example]
    rollout = sample_groups(policy, task, problems, 8, 1.0, generator=torch.Generator().manual_seed(0))
    rollout.completion_mask[:16] &= torch.arange(4) < 2  # The first process has short completions.
    rollout.old_log_probs += 0.3 * torch.randn(rollout.old_log_probs.shape, generator=torch.Generator().manual_seed(1))
    return rollout


def as_process(rank, count, port, folder, work, *arguments):
    """What torchrun does for a process, without starting Python anew: it calls `work` and keeps what it returns."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    torch.set_num_threads(1)
    with processes.joined():
        torch.save(work(*arguments), folder / f"{rank}.pt")


def run_on(count, folder, work, *arguments):
    """The results of all processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.start_processes(as_process, (count, port, folder, work, *arguments), count, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def take_steps(rollout):
    return steps(part(rollout, processes.share(range(7))), SETTINGS)


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_take_the_step_of_one(rollout, count, tmp_path):
    expected, described = steps(rollout, SETTINGS)
    start = warm_start().double().state_dict()
    for results, seen in run_on(count, tmp_path, take_steps, rollout):
        assert seen == pytest.approx(described, rel=1e-6)
        for (weights, metrics), (right, numbers) in zip(results, expected):
            assert metrics == pytest.approx(numbers, rel=1e-6)
            assert max((weight - right[name]).abs().max() for name, weight in weights.items()) < 1e-14
            assert max((weight - start[name]).abs().max() for name, weight in weights.items()) > 1e-5


def take_steps_of_a_real_model(policy, rollout):
    """As on a machine of its own, the rows of a process are padded to its own longest prompt."""
    own = part(rollout, processes.share(range(6)))
    columns = own.prompt_mask.any(dim=0)
    own.prompt_ids, own.prompt_mask = own.prompt_ids[:, columns], own.prompt_mask[:, columns]
    optimizer = torch.optim.SGD([weight for weight in policy.parameters() if weight.requires_grad], lr=0.3)
    metrics = grpo_update(policy, policy.reference(), optimizer, own, replace(CONFIG, micro_batch=5))
    return policy.state_dict(), metrics


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_a_real_model_takes_the_same_step_on_two_processes(lora, letters, tmp_path):
    transformers, causal_lm = pytest.importorskip("transformers"), pytest.importorskip("grpo_core.bridge.causal_lm")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.4)).double()
    policy = causal_lm.CausalLM(causal_lm.add_lora(model, 2) if lora else model)
    rollout = sample_groups(policy, letters, letters.problems * 2, 4, 1.0, generator=torch.Generator().manual_seed(0))
    assert rollout.prompt_mask is not None
    weights, metrics = take_steps_of_a_real_model(copy.deepcopy(policy), rollout)
    for others, numbers in run_on(2, tmp_path, take_steps_of_a_real_model, policy, rollout):
        assert numbers == pytest.approx(metrics, rel=1e-6)
        assert max((weight - others[name]).abs().max() for name, weight in weights.items()) < 1e-12
        assert max((weight - policy.state_dict()[name]).abs().max() for name, weight in weights.items()) > 1e-3


def train_and_measure(folder):
    policy, task, texts = warm_start(), Addition(), []
    history = train(
        task, policy, CONFIG, lambda _, rollout: texts.append(rollout and rollout.texts), checkpoint=folder / "run.pt"
    )
    return policy.state_dict(), history.frame, texts, greedy_accuracy(policy, task, task.validation)


def test_a_run_is_common_but_for_the_samples(tmp_path):
    one, other = run_on(2, tmp_path, train_and_measure, tmp_path)
    assert all(torch.equal(weight, other[0][name]) for name, weight in one[0].items())
    assert one[1].drop(columns="seconds").equals(other[1].drop(columns="seconds"))
    assert [len(texts) for texts in one[2][1:]] == [3 * 8] * 2 and [len(texts) for texts in other[2][1:]] == [4 * 8] * 2
    policy = warm_start()
    policy.load_state_dict(read_file(tmp_path / "run.pt")["parts"]["policy"])
    assert one[3] == other[3] == greedy_accuracy(policy, Addition(), Addition().validation)


def noise():
    generator = torch.Generator().manual_seed(0)
    own = processes.own_generator(generator)
    return torch.rand(3, generator=own), torch.rand(3, generator=generator)


def test_processes_sample_differently_and_draw_problems_alike(tmp_path):
    (one, common), (other, same) = run_on(2, tmp_path, noise)
    assert not torch.equal(one, other) and torch.equal(common, same)


def other_weights():
    policy = warm_start()
    if processes.rank() == 1:
        policy.head.bias.data.add_(1)
    processes.start_alike(policy)
    return policy.head.bias.detach()


def test_all_start_with_the_weights_of_process_0(tmp_path):
    assert all(torch.equal(bias, warm_start().head.bias) for bias in run_on(2, tmp_path, other_weights))


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "cpu:gloo,cuda:nccl")])
def test_numbers_can_be_sent_from_the_cpu_on_any_machine(gpu, backend, monkeypatch):
    """Without a name, torch would set up the backend of the GPU only, and metrics are sent from the CPU."""
    asked = []
    monkeypatch.setattr(processes.dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(processes.dist, "init_process_group", asked.append)
    monkeypatch.setattr(processes.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(processes.dist, "get_node_local_rank", lambda: 3)
    monkeypatch.setattr(processes.signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    with processes.joined():
        assert asked == [backend, 1][: 1 + gpu]


def any_stops():
    return processes.any_of(processes.rank() == 1), processes.any_of(False)


def test_one_process_stops_all(tmp_path):
    assert run_on(2, tmp_path, any_stops) == [(True, False)] * 2


def too_few_prompts():
    with pytest.raises(ValueError, match="at least 2: each process needs a group of its own"):
        train(Addition(), warm_start(), replace(CONFIG, prompts_per_iteration=1))


def test_each_process_needs_a_group(tmp_path):
    run_on(2, tmp_path, too_few_prompts)


def start_a_study():
    with pytest.raises(ValueError, match="scoreboard runs in one process: start it without torchrun"):
        command.study("scoreboard")


def test_a_study_runs_in_one_process(tmp_path):
    run_on(2, tmp_path, start_a_study)


def test_alone_nothing_is_added_or_changed():
    generator, numbers = torch.Generator(), {"a": 1.5}
    assert processes.count() == 1 and processes.rank() == 0
    assert processes.own_generator(generator) is generator and processes.add_up_numbers(numbers) is numbers
    assert processes.shares(torch.zeros(2, 3)) == (1.0, 1.0)
    assert processes.any_of(True) and not processes.any_of(False)


# With torchrun itself

DIES = """
import os, sys
import grpo_core.__main__ as command
from grpo_core import processes

train = command.train

def dying(*arguments, on_iteration, **settings):
    def show(row, rollout):
        if row["iteration"] == 3 and processes.rank() == 1:
            os._exit(1)
        on_iteration(row, rollout)
    return train(*arguments, on_iteration=show, **settings)

command.train = dying
command.main(sys.argv[1:])
"""


def torchrun(count, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_process_that_dies_leaves_a_run_that_others_can_finish(tmp_path):
    script, output = tmp_path / "dies.py", tmp_path / "run"
    script.write_text(DIES)
    died = torchrun(2, script, "--iterations", "5", "--prompts-per-iteration", "6", "--output", output)
    assert died.returncode != 0
    assert "error: another process of this run has ended; from the last checkpoint, --resume goes on" in died.stderr
    assert len(read_file(output / "checkpoints" / "seed0.pt")["rows"]) in (3, 4)

    finished = torchrun(3, "-m", "grpo_core", "--output", output, "--resume")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Training the start policy") == 1, "only process 0 speaks"
    history = pd.read_csv(output / "history.csv")
    assert history["iteration"].tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in output.iterdir()) == [
        "checkpoints", "group_example.txt", "grpo_accuracy.png", "grpo_kl.png", "history.csv", "settings.json"
    ]  # fmt: skip
