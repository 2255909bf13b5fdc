"""Agreement with TRL, the library that most people train with: the same loss, the same gradient, the same weights.

Everybody checks against golden numbers that TRL once gave. Where TRL is installed (`pip install -e ".[real]"`) its own loss
runs beside ours on random batches, and a step of its real trainer must leave the weights that `grpo_update` leaves.

`python tests/test_trl.py` writes the golden numbers again, with the installed TRL.
"""

import copy
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from benchmarks import tiny_trl
from torch import Tensor

import grpo_core.grpo
from grpo_core import Addition, GRPOConfig, Problem, Rollout, grpo_loss, grpo_update, token_log_probs
from grpo_core.rollout import encode_prompts

GOLDEN = Path(__file__).parent / "data" / "trl_losses.json"
MAX_TOKENS = 8  # The constant divisor.
OUR_NAME = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}
SETTINGS = list(itertools.product(OUR_NAME, (0.0, 0.1), (None, 0.28)))  # TRL's loss_type, beta, clip_eps_high


@dataclass
class Batch:
    """What both losses take, in float64; what stands behind a completion's end is arbitrary."""

    log_probs: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor | None


def make_batch(log_probs, old_log_probs, ref_log_probs, rewards=None, advantages=None) -> Batch:
    """A batch from lists of unequal length. TRL standardizes rewards with the sample standard deviation, plus 1e-4."""
    if rewards is not None:
        rewards = torch.tensor(rewards, dtype=torch.float64)
        centered = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (centered / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()
    rows = (log_probs, old_log_probs, ref_log_probs)
    lengths = torch.tensor([len(row) for row in log_probs])
    mask = torch.arange(max(lengths)) < lengths[:, None]
    return Batch(*map(padded, rows), mask, torch.as_tensor(advantages, dtype=torch.float64), rewards)


def padded(rows: list[list[float]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [-0.77] * (longest - len(row)) for row in rows], dtype=torch.float64)


def random_rows(seed: int, group_size: int = 4, longest: int = 6) -> dict[str, list]:
    """Arguments for `make_batch`: two groups, with a completion of one token and a full one among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (2 * group_size - 2,), generator=generator).tolist()]

    def rows(spread: float, around: list[list[float]]) -> list[list[float]]:
        return [[round(x + spread * torch.randn((), generator=generator).item(), 3) for x in row] for row in around]

    log_probs = rows(0.7, [[-2.0] * length for length in lengths])
    rewards = torch.rand(2, group_size, generator=generator, dtype=torch.float64).round(decimals=3).tolist()
    return {
        "log_probs": log_probs,
        "old_log_probs": rows(0.4, log_probs),
        "ref_log_probs": rows(0.4, log_probs),
        "rewards": rewards,
    }


def our_loss(batch: Batch, loss_type: str, beta: float, clip_eps_high: float | None) -> tuple[float, Tensor, dict]:
    """Loss, gradient with respect to the log-probs, metrics."""
    config = GRPOConfig(
        beta=beta, clip_eps_high=clip_eps_high, aggregation=OUR_NAME[loss_type], max_new_tokens=MAX_TOKENS, correction=1
    )
    nothing = torch.zeros_like(batch.mask, dtype=torch.long)
    rollout = Rollout(nothing, nothing, batch.mask, batch.old_log_probs, batch.rewards, temperature=1.0)
    log_probs = batch.log_probs.clone().requires_grad_()
    given = patch.object(grpo_core.grpo, "group_advantages", lambda *_: batch.advantages)
    with given if batch.rewards is None else nullcontext():
        loss, metrics = grpo_loss(log_probs, rollout, batch.ref_log_probs, config)
    return loss.item(), *torch.autograd.grad(loss, log_probs), metrics


def trl_loss(batch: Batch, loss_type: str, beta: float, clip_eps_high: float | None) -> tuple[float, Tensor, dict]:
    """The same from TRL: its `_compute_loss`, given a trainer that is nothing but settings and our log-probs."""
    from trl import GRPOTrainer

    log_probs = batch.log_probs.clone().requires_grad_()
    metrics = defaultdict(list)

    def same(x, reduction=None):  # There is one process only.
        return x

    trainer = SimpleNamespace(
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        beta=beta, epsilon_low=0.2, epsilon_high=0.2 if clip_eps_high is None else clip_eps_high,
        loss_type=loss_type, importance_sampling_level="token", max_completion_length=MAX_TOKENS,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, use_adaptive_entropy=False, current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True), _metrics={"train": metrics},
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
    )  # fmt: skip
    nothing = torch.zeros_like(batch.mask, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": nothing, "completion_mask": batch.mask.long(),
        "advantages": batch.advantages, "old_per_token_logps": batch.old_log_probs,
        "ref_per_token_logps": batch.ref_log_probs, "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.item(), *torch.autograd.grad(loss, log_probs), {name: values[-1] for name, values in metrics.items()}


# --- Golden numbers: for everybody


def golden() -> dict:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def key(batch: str, loss_type: str, beta: float, clip_eps_high: float | None) -> str:
    return f"{batch}, loss_type {loss_type}, beta {beta}, epsilon_high {clip_eps_high}"


def trl_results(batches: dict[str, dict]) -> dict[str, dict]:
    """What the installed TRL makes of the golden batches."""
    results = {}
    for (name, rows), setting in itertools.product(batches.items(), SETTINGS):
        loss, gradient, _ = trl_loss(make_batch(**rows), *setting)
        results[key(name, *setting)] = {"loss": round(loss, 10), "gradient": gradient.round(decimals=10).tolist()}
    return results


def write_golden() -> None:
    import trl

    example = {
        "log_probs": [[-1.0, -0.5, -0.2, -0.7], [-0.3, -2.0], [-1.2]],
        "old_log_probs": [[-1.5, -0.5, -0.1, -0.2], [-0.2, -1.5], [-1.2]],
        "ref_log_probs": [[-1.1, -0.9, -0.2, -0.5], [-0.4, -1.0], [-0.9]],
        "advantages": [1.0, -1.0, -0.5],
    }
    batches = {"example": example, "random": random_rows(seed=0)}
    entries = {"trl": trl.__version__, "batches": batches} | trl_results(batches)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


@pytest.mark.parametrize("name", ["example", "random"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_loss_and_gradient_are_trls_golden_numbers(name, setting):
    expected = golden()[key(name, *setting)]
    loss, gradient, _ = our_loss(make_batch(**golden()["batches"][name]), *setting)
    assert loss == pytest.approx(expected["loss"], abs=1e-9)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"], dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("loss_type", "beta", "expected"),
    [
        ("grpo", 0.0, 0.141526), ("grpo", 0.1, 0.156044), ("dapo", 0.0, -0.215219), ("dapo", 0.1, -0.202797),
        ("dr_grpo", 0.0, -0.062772), ("dr_grpo", 0.1, -0.059149),
    ],
)  # fmt: skip
def test_the_golden_example_has_the_known_losses(loss_type, beta, expected):
    """These six were computed apart from the golden file; so a file made with wrong inputs would be noticed."""
    assert golden()[key("example", loss_type, beta, None)]["loss"] == pytest.approx(expected, abs=1e-6)


def test_the_random_golden_batch_reaches_every_branch():
    """Ratios below, inside and above the clip for both signs, shortest and longest rows, or agreement would mean little."""
    batch = make_batch(**golden()["batches"]["random"])
    ratio = (batch.log_probs - batch.old_log_probs).exp()
    for sign in (1, -1):
        for low, high in ((0, 0.8), (0.8, 1.2), (1.28, 9)):
            assert (batch.mask & (low < ratio) & (ratio < high) & (sign * batch.advantages[:, None] > 0)).any()
    assert {1, batch.mask.shape[1]} < set(batch.mask.sum(dim=1).tolist())


# --- Live: where TRL is installed


@pytest.fixture(scope="module")
def trl():
    if not tiny_trl.trl_is_installed():
        pytest.skip('TRL is not installed: pip install -e ".[real]" runs the live comparison')
    tiny_trl.quiet_and_offline()
    return pytest.importorskip("trl")


def test_golden_numbers_are_those_of_the_installed_trl(trl):
    stored = golden()
    for name, result in trl_results(stored["batches"]).items():
        assert result["loss"] == pytest.approx(stored[name]["loss"], abs=1e-9), f"{name}: {stored['trl']}, {trl.__version__}"
        torch.testing.assert_close(torch.tensor(result["gradient"]), torch.tensor(stored[name]["gradient"]))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_loss_gradient_and_metrics_are_trls(trl, setting, seed):
    batch = make_batch(**random_rows(seed))
    loss, gradient, metrics = our_loss(batch, *setting)
    trls_loss, trls_gradient, trls_metrics = trl_loss(batch, *setting)
    assert loss == pytest.approx(trls_loss, abs=1e-9)
    torch.testing.assert_close(gradient, trls_gradient, rtol=0, atol=1e-9)
    assert metrics["clip_fraction"] == pytest.approx(trls_metrics["clip_ratio/region_mean"], abs=1e-6)
    if "kl" in trls_metrics:
        assert metrics["kl"] == pytest.approx(trls_metrics["kl"], abs=1e-6)


COMPLETIONS = {
    Problem("24+48=", "72"): ["72;", "7;", "72;", "9999"],
    Problem("10+23=", "33"): ["3;", ";", "33;", "3+3;"],
    Problem("1+2=", "3"): ["3;", "4;", "33;", "=12"],
}
SAME_LENGTH, MIXED_LENGTHS = list(COMPLETIONS)[:2], list(COMPLETIONS)[1:]
TEMPERATURE = 0.9


def injected_rollout(policy, problems) -> Rollout:
    """The completions above, as if `policy` had sampled them."""
    task = Addition()
    texts = [text for problem in problems for text in COMPLETIONS[problem]]
    rows = [task.encode(text) for text in texts]
    longest = max(map(len, rows))
    completion_ids = torch.tensor([row + [task.eos_id] * (longest - len(row)) for row in rows])
    prompt_ids, prompt_mask = encode_prompts(task, problems, "cpu")
    prompt_ids = prompt_ids.repeat_interleave(4, dim=0)
    prompt_mask = None if prompt_mask is None else prompt_mask.repeat_interleave(4, dim=0)
    with torch.no_grad():
        old_log_probs = token_log_probs(policy, prompt_ids, completion_ids, TEMPERATURE, prompt_mask)
    return Rollout(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_mask=torch.tensor([[t < len(row) for t in range(longest)] for row in rows]),
        old_log_probs=old_log_probs,
        rewards=torch.tensor([[task.verify(text, p.answer) for text in COMPLETIONS[p]] for p in problems]),
        temperature=TEMPERATURE,
        prompt_mask=prompt_mask,
    )


def injecting(problems) -> Callable:
    """A rollout_func for TRL that hands out the same completions; its trainer asks once for each row."""
    task, supply = Addition(), {problem.prompt: cycle(COMPLETIONS[problem]) for problem in problems}

    def rollout(prompts, trainer) -> dict[str, list]:
        completions = [task.encode(next(supply[prompt])) for prompt in prompts]
        unused = [[0.0] * len(ids) for ids in completions]
        return {"prompt_ids": [task.encode(prompt) for prompt in prompts], "completion_ids": completions, "logprobs": unused}

    return rollout


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # Inside of transformers.
@pytest.mark.parametrize(
    ("build", "problems", "loss_type", "inner_epochs"),
    [
        (tiny_trl.random_gpt2, SAME_LENGTH, "grpo", 1),
        (tiny_trl.random_gpt2, SAME_LENGTH, "dr_grpo", 1),
        (tiny_trl.random_gpt2, SAME_LENGTH, "dapo", 1),
        (tiny_trl.random_gpt2, SAME_LENGTH, "dapo", 2),
        (tiny_trl.random_llama, MIXED_LENGTHS, "dapo", 1),
        (tiny_trl.random_llama, MIXED_LENGTHS, "grpo", 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_weights_after_an_update_are_those_of_trls_trainer(trl, tmp_path, build, problems, loss_type, inner_epochs):
    """Prompts of different lengths are compared on Llama only: for GPT-2, TRL counts the padding as positions."""
    start, reference = build(width=32, heads=2, seed=0), build(width=32, heads=2, seed=1)
    trainer = tiny_trl.make_trainer(
        start, problems, tmp_path, rollout_func=injecting(problems), shuffle_dataset=False,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=MAX_TOKENS, temperature=TEMPERATURE,
        beta=0.1, loss_type=loss_type, num_iterations=inner_epochs, max_steps=inner_epochs, optim="sgd",
        learning_rate=0.5, max_grad_norm=1e9,
    )  # fmt: skip
    trainer.ref_model.load_state_dict(reference.state_dict())  # Not the start policy, so that the leash pulls at once.
    trainer.train()

    ours = copy.deepcopy(start)
    config = GRPOConfig(
        beta=0.1, aggregation=OUR_NAME[loss_type], inner_epochs=inner_epochs, max_new_tokens=MAX_TOKENS, correction=1,
        max_grad_norm=1e9,
    )  # fmt: skip
    grpo_update(ours, reference, torch.optim.SGD(ours.parameters(), lr=0.5), injected_rollout(ours, problems), config)

    assert distance(ours, start) > 1e-2
    assert distance(ours, trainer.model) < 1e-6


def distance(one, other) -> float:
    """The largest difference between two weights."""
    weights = other.state_dict()
    return max((weight - weights[name]).abs().max().item() for name, weight in one.state_dict().items())


if __name__ == "__main__":
    write_golden()
