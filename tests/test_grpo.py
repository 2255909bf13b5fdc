"""GRPO: the loss by hand, the update against the exact gradient, and training that learns, stops and repeats itself."""

import copy
import dataclasses
import math
from itertools import product
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import grpo_core.grpo
from grpo_core import (
    GRPOConfig,
    Rollout,
    TrainingDiverged,
    aggregate,
    clipped_surrogate,
    grpo_loss,
    grpo_update,
    kl_estimate,
    sample_groups,
    success_probability,
    token_log_probs,
    train,
    warm_start,
)
from grpo_core.history import describe

AGGREGATIONS = ["token", "sequence", "constant"]
SMALL = GRPOConfig(prompts_per_iteration=3, group_size=8, iterations=3, max_new_tokens=3, learning_rate=5e-3)
REAL = GRPOConfig(iterations=5, inner_epochs=8, learning_rate=5e-4, beta=0.0, evaluate_every=5, evaluate_on="validation")


def weights(policy):
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def sgd(policy, lr=0.1):
    return torch.optim.SGD(policy.parameters(), lr=lr)


def without_time(history):
    return history.frame.drop(columns="seconds")


@pytest.fixture
def rollout(letters, tiny):
    """Sampled by another policy than `tiny()`, so that the ratio is not 1; prompts of three lengths."""
    return sample_groups(tiny(1), letters, letters.problems, 4, 1.3, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def same_length(letters, tiny):
    return sample_groups(tiny(1), letters, letters.train, 4, 1.3, generator=torch.Generator().manual_seed(3))


def loss_by_hand(log_probs, old, ref, advantages, c):
    """The loss from lists of rows, each as long as its completion: no mask, no padding, no special cases."""
    rows = []
    for lp, o, r, a in zip(log_probs, old, ref, advantages):
        ratio, d = (lp - o).exp(), r - lp
        high = 1 + (c.clip_eps if c.clip_eps_high is None else c.clip_eps_high)
        bounded = ratio.clamp(1 - c.clip_eps, high)
        kl = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[c.kl]
        rows.append(-torch.stack([ratio * a, bounded * a]).amin(0) + c.beta * kl)
    sums = [row.sum() for row in rows]
    return {
        "token": sum(sums) / sum(map(len, rows)),
        "sequence": sum(row.mean() for row in rows) / len(rows),
        "constant": sum(sums) / (len(rows) * c.max_new_tokens),
    }[c.aggregation]


def advantages_by_hand(rewards, c):
    centered = rewards - rewards.mean(1, keepdim=True)
    return (centered / (rewards.var(1, keepdim=True, correction=c.correction).sqrt() + c.std_eps)).flatten()


def rows_of(values, rollout):
    return [row[mask] for row, mask in zip(values, rollout.completion_mask)]


def one_row_at_a_time(policy, rollout):
    """Log-probs of each completion by the definition: one text, nothing behind its EOS, no padding before it."""
    rows = []
    real = [None] * len(rollout.prompt_ids) if rollout.prompt_mask is None else rollout.prompt_mask
    for prompt, mask, completion in zip(rollout.prompt_ids, real, rows_of(rollout.completion_ids, rollout)):
        prompt = prompt if mask is None else prompt[mask]
        logits = policy(torch.cat([prompt, completion])[None])[0, len(prompt) - 1 : -1]
        rows.append((logits / rollout.temperature).log_softmax(1)[range(len(completion)), completion])
    return rows


# ---- aggregate


@pytest.mark.parametrize("how, short, long", [("sequence", 0.25, 0.0625), ("token", 0.1, 0.1), ("constant", 0.0625, 0.0625)])
def test_weight_of_a_token_in_a_short_and_a_long_completion(how, short, long):
    mask = torch.tensor([[t < 2 for t in range(8)], [True] * 8])
    per_token = torch.zeros(2, 8, requires_grad=True)
    aggregate(per_token, mask, how, max_tokens=8).backward()
    assert_close(per_token.grad, torch.tensor([[short] * 2 + [0] * 6, [long] * 8]))


@pytest.mark.parametrize("how, value", [("sequence", 0.0), ("token", 0.5), ("constant", 0.25)])
def test_loss_of_the_first_step_says_nothing_and_its_gradient_does(how, value):
    log_probs = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss = aggregate(-clipped_surrogate(log_probs, log_probs.detach(), torch.tensor([1.0, -1.0])), mask, how, max_tokens=4)
    loss.backward()
    assert loss.item() == pytest.approx(value, abs=1e-7)
    assert ((log_probs.grad != 0) == mask.bool()).all() and (log_probs.grad[0, 0] < 0 < log_probs.grad[1, 0])


def test_token_mean_is_no_mean_of_means():
    per_token, mask = torch.tensor([[1.0, 1, 1, 1], [5, 9, 9, 9]]), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert aggregate(per_token, mask).item() == pytest.approx(1.8)
    parts = [aggregate(per_token[i : i + 1], mask, rows=slice(i, i + 1)).item() for i in range(2)]
    assert parts == pytest.approx([0.8, 1.0])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(1, 4), st.sampled_from(AGGREGATIONS))
def test_parts_add_up_to_the_whole_however_it_is_split(lengths, size, how):
    mask = torch.tensor([[t < n for t in range(4)] for n in lengths])
    per_token = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [slice(i, i + size) for i in range(0, len(mask), size)]
    parts = sum(aggregate(per_token[r], mask, how, 4, r) for r in rows)
    means = [per_token[i, :n].mean().item() for i, n in enumerate(lengths) if n]
    total = sum(per_token[i, :n].sum().item() for i, n in enumerate(lengths))
    whole = {"token": total / max(sum(lengths), 1), "sequence": sum(means) / len(lengths), "constant": total / len(lengths) / 4}
    assert parts.item() == pytest.approx(whole[how]) == aggregate(per_token, mask, how, 4).item()


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e38])
def test_nothing_outside_the_mask_is_read(how, garbage):
    mask = torch.tensor([[1, 0], [0, 0], [1, 1]])
    per_token = torch.tensor([[1.0, garbage], [garbage, garbage], [1.0, 1.0]], requires_grad=True)
    value = aggregate(per_token, mask, how, max_tokens=2)
    value.backward()
    assert value.item() == pytest.approx({"token": 1, "sequence": 2 / 3, "constant": 1 / 2}[how])
    assert ((per_token.grad > 0) == mask.bool()).all()


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_empty_mask_gives_zero(how):
    per_token = torch.ones(2, 3, requires_grad=True)
    value = aggregate(per_token, torch.zeros(2, 3), how, max_tokens=3)
    value.backward()
    assert value.item() == 0 and (per_token.grad == 0).all()


@pytest.mark.parametrize("how, max_tokens", [("mean", 4), ("constant", None), ("constant", 0), (None, 4)])
def test_unknown_aggregation_is_named(how, max_tokens):
    with pytest.raises(ValueError, match="aggregation must be"):
        aggregate(torch.ones(1, 1), torch.ones(1, 1), how, max_tokens)


# ---- grpo_loss


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("changes", [{}, {"beta": 0.0}, {"kl": "k1"}, {"kl": "k2"}, {"correction": 1}, {"clip_eps_high": 0.5}])
def test_loss_and_gradient_are_those_computed_by_hand(tiny, rollout, aggregation, changes):
    config = dataclasses.replace(GRPOConfig(beta=0.3, aggregation=aggregation, max_new_tokens=7), **changes)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *rollout.old_log_probs.shape, generator=generator, dtype=torch.float64)
    log_probs, ref = rollout.old_log_probs + noise / 2
    log_probs.requires_grad_()
    loss, metrics = grpo_loss(log_probs, rollout, ref, config)
    rows = [rows_of(x, rollout) for x in (log_probs, rollout.old_log_probs, ref)]
    expected = loss_by_hand(*rows, advantages_by_hand(rollout.rewards.double(), config), config)
    assert_close(loss, expected, atol=1e-6, rtol=1e-6)  # Rewards, and so advantages, are float32.
    assert metrics["loss"] == pytest.approx(loss.item())
    assert_close(torch.autograd.grad(loss, log_probs), torch.autograd.grad(expected, log_probs), atol=1e-6, rtol=1e-6)
    d = torch.cat(rows[2]) - torch.cat(rows[0])
    assert metrics["kl"] == pytest.approx((d.exp() - d - 1).mean().item())  # Always k3, whatever the leash uses.


@pytest.mark.parametrize(
    "aggregation, free, leashed",
    [("sequence", 0.141526, 0.156044), ("token", -0.215219, -0.202797), ("constant", -0.062772, -0.059149)],
)
def test_loss_has_the_values_of_the_reference_implementation(aggregation, free, leashed):
    def pad(*rows):
        return torch.tensor([[*row, *[math.nan] * (4 - len(row))] for row in rows])

    log_probs, mask = pad([-1, -0.5, -0.2, -0.7], [-0.3, -2], [-1.2]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    old, ref = pad([-1.5, -0.5, -0.1, -0.2], [-0.2, -1.5], [-1.2]), pad([-1.1, -0.9, -0.2, -0.5], [-0.4, -1.0], [-0.9])
    surrogate = clipped_surrogate(log_probs, old, torch.tensor([1.0, -1.0, -0.5]))
    for beta, expected in [(0.0, free), (0.1, leashed)]:
        loss = aggregate(-surrogate + beta * kl_estimate(log_probs, ref), mask, aggregation, max_tokens=8)
        assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_nothing_behind_the_eos_leaks_into_loss_or_gradient(rollout, garbage, kl):
    def run(filling):
        log_probs, old, ref = (torch.where(mask, rollout.old_log_probs + shift, filling) for shift in (0.1, 0.0, -0.2))
        log_probs.requires_grad_()
        loss, metrics = grpo_loss(log_probs, dataclasses.replace(rollout, old_log_probs=old), ref, GRPOConfig(kl=kl))
        return metrics, *torch.autograd.grad(loss, log_probs)

    mask = rollout.completion_mask
    assert not mask.all()
    (clean, expected), (metrics, gradient) = run(0.0), run(garbage)
    assert metrics == clean
    assert torch.equal(gradient, expected) and (gradient[~mask] == 0).all()


def test_empty_mask_gives_loss_zero_and_finite_metrics(rollout):
    rollout.completion_mask = torch.zeros_like(rollout.completion_mask)
    log_probs = rollout.old_log_probs.clone().requires_grad_()
    loss, metrics = grpo_loss(log_probs, rollout, rollout.old_log_probs - 1, GRPOConfig())
    loss.backward()
    assert set(metrics.values()) == {0.0} and (log_probs.grad == 0).all()


def test_flat_groups_still_feel_the_leash(rollout):
    rollout.rewards = torch.full_like(rollout.rewards, 0.7)
    log_probs, mask = rollout.old_log_probs.clone().requires_grad_(), rollout.completion_mask
    loss, _ = grpo_loss(log_probs, rollout, rollout.old_log_probs + 0.5, GRPOConfig(beta=0.08))
    loss.backward()
    assert_close(log_probs.grad[mask], torch.full_like(log_probs[mask], 0.08 * (1 - math.exp(0.5)) / mask.sum().item()))
    assert_close(loss.item(), 0.08 * (math.exp(0.5) - 1.5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_any_type_of_reward_will_do(rollout, dtype):
    log_probs = rollout.old_log_probs + 0.1
    loss, _ = grpo_loss(log_probs, rollout, None, GRPOConfig(beta=0.0))
    rollout.rewards = rollout.rewards.to(dtype)
    assert grpo_loss(log_probs, rollout, None, GRPOConfig(beta=0.0))[0].item() == pytest.approx(loss.item(), rel=1e-5)


def test_leash_needs_a_reference(tiny, rollout):
    with pytest.raises(ValueError, match=r"beta > 0.*ref_log_probs"):
        grpo_loss(rollout.old_log_probs, rollout, None, GRPOConfig(beta=0.1))
    with pytest.raises(ValueError, match=r"beta > 0"):
        grpo_update(policy := tiny(), None, sgd(policy), rollout, GRPOConfig(beta=0.1))


@pytest.mark.parametrize("group_size, temperature", [(2, 0.7), (2, 1.0), (2, 1.5), (3, 0.7)])
def test_expected_update_is_the_exact_gradient_of_the_expected_reward(letters, tiny, gradient, group_size, temperature):
    """Over all possible groups, weighted by their probability. The own share in the mean costs a factor 1 − 1/G."""
    policy, (ids, mask) = tiny(), letters.completions()
    rewards = torch.linspace(-1, 2, len(ids), dtype=torch.float64).sin()
    probability = letters.log_probs(policy, "ab", temperature).where(mask, 0.0).sum(1).exp()
    exact = gradient(probability @ rewards, policy)
    groups = torch.tensor(list(product(range(len(ids)), repeat=group_size)))
    chance, rows = probability.detach()[groups].prod(1).repeat_interleave(group_size), groups.flatten()

    prompts = torch.tensor([letters.encode("ab")] * len(rows))
    log_probs = token_log_probs(policy, prompts, ids[rows], temperature)
    rollout = Rollout(prompts, ids[rows], mask[rows], log_probs.detach(), rewards[groups], temperature)
    config = GRPOConfig(beta=0.0, scale="none", aggregation="constant", max_new_tokens=1)
    per_token = torch.autograd.grad(grpo_loss(log_probs, rollout, None, config)[0], log_probs, retain_graph=True)[0]
    expected_update = gradient(-(chance[:, None] * len(rows) * per_token * log_probs).sum() / group_size, policy)
    assert_close(expected_update, (1 - 1 / group_size) * exact)


# ---- grpo_update


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lengths", ["rollout", "same_length"])
def test_two_steps_move_the_weights_as_computed_row_by_row(tiny, request, lengths, aggregation):
    rollout, policy, reference = request.getfixturevalue(lengths), tiny(), tiny(2)
    config = GRPOConfig(aggregation=aggregation, max_new_tokens=3, max_grad_norm=1e9, inner_epochs=2)
    by_hand = copy.deepcopy(policy)
    grpo_update(policy, reference, sgd(policy, 0.3), rollout, config)
    optimizer, advantages = sgd(by_hand, 0.3), advantages_by_hand(rollout.rewards.double(), config)
    ref = [row.detach() for row in one_row_at_a_time(reference, rollout)]
    for _ in range(2):
        optimizer.zero_grad()
        loss_by_hand(
            one_row_at_a_time(by_hand, rollout), rows_of(rollout.old_log_probs, rollout), ref, advantages, config
        ).backward()  # fmt: skip
        optimizer.step()
    assert (weights(policy) - weights(tiny())).abs().max() > 1e-3
    assert_close(weights(policy), weights(by_hand), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("size", [1, 3, 5, 12, 100])
def test_micro_batches_change_neither_weights_nor_metrics(tiny, rollout, aggregation, size):
    policies, metrics = [tiny(), tiny()], []
    for policy, micro_batch in zip(policies, (None, size)):
        config = GRPOConfig(aggregation=aggregation, micro_batch=micro_batch, inner_epochs=2, max_new_tokens=3)
        metrics.append(grpo_update(policy, tiny(2), sgd(policy), rollout, config))
    assert_close(*map(weights, policies))
    assert metrics[0] == pytest.approx(metrics[1])


@pytest.mark.parametrize("order", [[2, 0, 1], "rows"])
def test_order_of_groups_and_of_rows_within_a_group_does_not_matter(tiny, rollout, order):
    index = torch.arange(12).view(3, 4)
    index = index.flip(1) if order == "rows" else index[order]
    shuffled = {
        name: getattr(rollout, name)[index.flatten()]
        for name in ("prompt_ids", "completion_ids", "completion_mask", "old_log_probs", "prompt_mask")
    }
    other = dataclasses.replace(rollout, rewards=rollout.rewards.flatten()[index], **shuffled)
    policies = [tiny(), tiny()]
    for policy, data in zip(policies, (rollout, other)):
        grpo_update(policy, tiny(2), sgd(policy), data, GRPOConfig())
    assert_close(*map(weights, policies), atol=1e-7, rtol=1e-6)


class Bigram(nn.Module):
    """Not a transformer: each token's logits are a row of a table, behind dropout, plainly or as `.logits`."""

    def __init__(self, dropout=0.0, wrap=False):
        super().__init__()
        self.table, self.dropout, self.wrap = nn.Embedding(3, 3), nn.Dropout(dropout), wrap
        nn.init.zeros_(self.table.weight)

    def forward(self, token_ids, **arguments):
        assert self.wrap or not arguments  # Masks and positions are given only where prompts differ in length.
        logits = self.dropout(self.table(token_ids))
        return SimpleNamespace(logits=logits) if self.wrap else logits


@pytest.mark.parametrize(
    "lengths, options", [("same_length", {}), ("same_length", {"dropout": 0.5}), ("rollout", {"wrap": True})]
)
def test_any_module_from_ids_to_logits_can_be_trained(request, lengths, options):
    policy, rollout = Bigram(**options), request.getfixturevalue(lengths)
    reference = copy.deepcopy(policy)
    arguments = rollout.prompt_ids, rollout.completion_ids, rollout.temperature, rollout.prompt_mask
    rollout.old_log_probs = token_log_probs(policy, *arguments).detach()
    metrics = grpo_update(policy, reference, sgd(policy, 1.0), rollout, GRPOConfig(inner_epochs=1))
    assert metrics["clip_fraction"] == metrics["kl"] == 0 and metrics["grad_norm"] > 0
    gain = (token_log_probs(policy, *arguments) - rollout.old_log_probs).where(rollout.completion_mask, 0.0).sum(1)
    assert (gain * advantages_by_hand(rollout.rewards, GRPOConfig())).sum() > 0
    assert policy.training and torch.equal(weights(reference), weights(Bigram()))


def test_one_inner_epoch_never_clips_and_its_loss_is_zero_where_its_gradient_is_not(tiny, letters):
    policy = tiny()
    rollout = sample_groups(policy, letters, letters.problems, 8, 1.3, generator=torch.Generator().manual_seed(0))
    config = GRPOConfig(inner_epochs=1, aggregation="sequence")
    metrics = grpo_update(policy, copy.deepcopy(policy), sgd(policy, 5.0), rollout, config)
    assert metrics["clip_fraction"] == metrics["kl"] == 0.0
    assert metrics["loss"] == pytest.approx(0, abs=1e-6) and metrics["grad_norm"] > 0.01
    assert grpo_update(tiny(), tiny(), sgd(policy), rollout, config)["clip_fraction"] == 0.0


def test_without_leash_no_reference_is_needed_and_no_kl_is_measured(tiny, rollout):
    policies = [tiny(), tiny()]
    metrics = [
        grpo_update(policy, reference, sgd(policy), rollout, GRPOConfig(beta=0.0))
        for policy, reference in zip(policies, (None, tiny(2)))
    ]
    assert torch.equal(*map(weights, policies))
    assert "kl" not in metrics[0] and metrics[1]["kl"] > 0


@pytest.mark.parametrize("largest", [1e-3, 1e9])
def test_large_gradients_are_scaled_down_and_reported_as_they_were(tiny, rollout, largest):
    policy = tiny()
    metrics = grpo_update(policy, tiny(2), sgd(policy, 1.0), rollout, GRPOConfig(inner_epochs=1, max_grad_norm=largest))
    moved = (weights(policy) - weights(tiny())).norm().item()
    assert metrics["grad_norm"] > 1e-2
    assert moved == pytest.approx(min(largest, metrics["grad_norm"]), rel=1e-4)


def test_step_with_a_loss_that_is_not_finite_is_not_taken(tiny, rollout):
    policy, rollout.rewards = tiny(), torch.eye(3, 4)
    optimizer = torch.optim.AdamW(policy.parameters())
    rollout.old_log_probs[0] = math.nan
    before, state = weights(policy), str(optimizer.state_dict())
    with pytest.raises(FloatingPointError, match="loss nan"):
        grpo_update(policy, tiny(2), optimizer, rollout, GRPOConfig())
    assert torch.equal(weights(policy), before) and str(optimizer.state_dict()) == state
    assert all(weight.grad is None for weight in policy.parameters())


# ---- GRPOConfig


@pytest.mark.parametrize(
    "name, values",
    {
        "group_size": [1, 0, -8, 2.5],
        "temperature": [0.0, -0.7, math.nan, math.inf],
        "clip_eps": [0.0, 1.0, -0.2, 1.2, math.nan],
        "clip_eps_high": [0.0, -0.2],
        "beta": [-0.08, math.nan, math.inf],
        "kl": ["k4", "K3", None],
        "scale": ["batch", None],
        "aggregation": ["mean", None],
        "correction": [2, -1],
        "evaluate_on": ["train"],
        "learning_rate": [0.0, -1e-4, math.nan, math.inf],
        "max_grad_norm": [0.0, -1.0],
        "std_eps": [-1e-4],
    }.items(),
)
def test_setting_that_makes_no_sense_is_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            GRPOConfig(**{name: value})


@pytest.mark.parametrize(
    "name", ["prompts_per_iteration", "iterations", "inner_epochs", "max_new_tokens", "micro_batch", "evaluate_every"]
)
def test_counts_start_at_one(name):
    assert getattr(GRPOConfig(**{name: 1}), name) == 1
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            GRPOConfig(**{name: value})


def test_greedy_sampling_is_pointed_to_its_function():
    with pytest.raises(ValueError, match="greedy_accuracy"):
        GRPOConfig(temperature=0)


def test_defaults_are_those_of_the_experiment_and_frozen():
    c = GRPOConfig()
    assert (c.prompts_per_iteration, c.group_size, c.iterations, c.temperature) == (48, 8, 20, 0.7)
    assert (c.clip_eps, c.clip_eps_high, c.beta, c.kl) == (0.2, None, 0.08, "k3")
    assert (c.scale, c.std_eps, c.correction) == ("std", 1e-4, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.beta = 0.0


# ---- train


@pytest.mark.parametrize("seed", [0, 1])
def test_training_makes_the_start_policy_better(task, seed):
    """Measured in this setting: 0.66 to 0.71 on four seeds. With one thing wrong, on two: the advantage's sign 0.05, the mask
    turned round 0.03, the maximum for negative advantages 0.33, no clip 0.43, scored at another temperature 0.50."""
    history = train(task, warm_start(), dataclasses.replace(REAL, seed=seed))
    start, end = history.frame["accuracy"].dropna()
    assert 0.3 < start < 0.4
    assert end > 0.58


def success(task, policy):
    return success_probability(policy, task, task.train, SMALL.temperature).mean().item()


@pytest.mark.parametrize("seed", [0, 1])
def test_training_learns_another_task(letters, tiny, seed):
    """To say nothing but EOS. Measured: from 0.34 and 0.17 to 1.00."""
    letters.train, policy = [problem._replace(answer="") for problem in letters.train], tiny(seed)
    config = dataclasses.replace(SMALL, seed=seed, group_size=32, iterations=15, learning_rate=0.02, beta=0.0)
    assert success(letters, policy) < 0.4
    train(letters, policy, config)
    assert success(letters, policy) > 0.9


def test_reference_stays_the_start_policy_and_shares_no_storage(letters, tiny, monkeypatch):
    seen, policy = [], tiny()
    monkeypatch.setattr(grpo_core.grpo, "grpo_update", lambda p, r, *rest: seen.append(r) or grpo_update(p, r, *rest))
    history = train(letters, policy, SMALL)
    reference = seen[-1]
    assert all(r is reference for r in seen)
    assert torch.equal(weights(reference), weights(tiny())) and not torch.equal(weights(policy), weights(tiny()))
    assert not {w.data_ptr() for w in reference.parameters()} & {w.data_ptr() for w in policy.parameters()}
    assert not any(w.requires_grad for w in reference.parameters())
    assert history.frame["kl"][1] == 0 and history.frame["kl"][3] > 0


def test_same_seed_is_the_same_run_whatever_ran_before(letters, tiny):
    def run(seed=0):
        policy = tiny()
        return without_time(train(letters, policy, dataclasses.replace(SMALL, seed=seed))), weights(policy)

    first, first_weights = run()
    torch.manual_seed(123)
    other, other_weights = run(seed=1)
    torch.randn(1000)
    again, again_weights = run()
    assert first.equals(again) and torch.equal(first_weights, again_weights)
    assert not first.equals(other) and not torch.equal(first_weights, other_weights)


def test_training_leaves_the_global_generator_alone(letters, tiny):
    policy = tiny()
    before = torch.get_rng_state()
    train(letters, policy, SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_callback_sees_each_row_with_its_rollout(letters, tiny):
    seen = []
    history = train(letters, tiny(), SMALL, on_iteration=lambda *pair: seen.append(pair))
    assert [row for row, _ in seen] == history.rows and [row["iteration"] for row in history.rows] == [0, 1, 2, 3]
    assert seen[0][1] is None
    for row, rollout in seen[1:]:
        assert rollout.rewards.shape == (3, 8) and rollout.temperature == SMALL.temperature
        assert row["reward"] == pytest.approx(rollout.rewards.mean().item())
    assert history.frame.drop(index=0).notna().all(axis=None)


@pytest.mark.parametrize(("schedule", "expected"), [("constant", [3.0, 3.0, 3.0]), ("linear", [3.0, 2.0, 1.0])])
def test_schedule_sets_the_step_size_of_each_iteration(letters, tiny, monkeypatch, schedule, expected):
    seen = []

    def update(policy, reference, optimizer, rollout, config):
        seen.append(optimizer.param_groups[0]["lr"])
        return {}

    monkeypatch.setattr(grpo_core.grpo, "grpo_update", update)
    train(letters, tiny(), dataclasses.replace(SMALL, learning_rate=3.0, schedule=schedule))
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize("after", [0, 2])
def test_stop_ends_before_the_next_iteration(letters, tiny, after):
    policy, rows = tiny(), []
    history = train(letters, policy, SMALL, lambda row, _: rows.append(row), should_stop=lambda: len(rows) == after)
    assert len(history.rows) == after
    whole = train(letters, tiny(), SMALL)
    pd.testing.assert_frame_equal(without_time(history), without_time(whole)[:after], check_dtype=False, check_index_type=False)


def test_interrupt_returns_what_there_is(letters, tiny):
    def interrupt(row, rollout):
        if row["iteration"] == 2:
            raise KeyboardInterrupt

    policy, short = tiny(), tiny()
    history = train(letters, policy, SMALL, interrupt)
    train(letters, short, dataclasses.replace(SMALL, iterations=2))
    assert [row["iteration"] for row in history.rows] == [0, 1, 2]
    assert torch.equal(weights(policy), weights(short)) and weights(policy).isfinite().all()


def test_other_errors_of_a_callback_are_not_swallowed(letters, tiny):
    with pytest.raises(ZeroDivisionError):
        train(letters, tiny(), SMALL, lambda *_: 1 / 0)


def test_divergence_names_the_iteration_and_takes_no_further_step(letters, tiny):
    def poison(row, rollout):
        if row["iteration"] == 2:
            policy.blocks[0].mlp_in.weight.data[0, 0] = math.nan
            left.append(weights(policy))

    policy, left = tiny(), []
    with pytest.raises(TrainingDiverged, match="iteration 3") as error:
        train(letters, policy, SMALL, poison)
    assert [row["iteration"] for row in error.value.history.rows] == [0, 1, 2]
    assert torch.equal(weights(policy).nan_to_num(7.0), left[0].nan_to_num(7.0))


def test_absurd_learning_rate_ends_in_words(letters, tiny):
    with pytest.raises(TrainingDiverged, match=r"iteration 1 .*learning_rate") as error:
        train(letters, tiny(), dataclasses.replace(SMALL, learning_rate=1e300))
    assert len(error.value.history.rows) == 1


def test_loss_that_is_not_finite_leaves_the_policy_of_the_iteration_before(letters, tiny, monkeypatch):
    def broken(log_probs, rollout, *rest):
        loss, metrics = grpo_loss(log_probs, rollout, *rest)
        return (loss * math.inf, metrics) if len(left) == 3 else (loss, metrics)

    policy, left = tiny(), []
    monkeypatch.setattr(grpo_core.grpo, "grpo_loss", broken)
    with pytest.raises(TrainingDiverged, match="iteration 3"):
        train(letters, policy, SMALL, lambda *_: left.append(weights(policy)))
    assert torch.equal(weights(policy), left[-1])


@pytest.mark.parametrize("inner_epochs", [1, 4])
def test_clip_acts_from_the_second_inner_epoch_on(letters, tiny, inner_epochs):
    config = dataclasses.replace(SMALL, inner_epochs=inner_epochs, learning_rate=0.02)
    clipped = train(letters, tiny(), config).frame["clip_fraction"][1:]
    assert (clipped == 0).all() if inner_epochs == 1 else (clipped > 0).any()


def test_only_training_problems_are_sampled_and_no_batch_repeats_one(task):
    batches = []
    config = GRPOConfig(prompts_per_iteration=300, group_size=2, iterations=3, inner_epochs=1, evaluate_every=9)
    train(task, warm_start(), config, lambda _, rollout: rollout and batches.append(rollout.problems))
    assert len(batches) == 3 and batches[0][0] == task.example
    assert all(len(batch) == 300 == len(set(batch[1:])) + 1 for batch in batches)
    assert set().union(*batches) <= set(task.train)


@pytest.mark.parametrize("part", ["held_out", "validation"])
def test_accuracy_is_measured_on_the_asked_part_when_asked_and_at_the_end(task, monkeypatch, part):
    measured, real = [], grpo_core.grpo.greedy_accuracy
    monkeypatch.setattr(grpo_core.grpo, "greedy_accuracy", lambda p, t, x: measured.append(x) or real(p, t, x[:20]))
    config = GRPOConfig(prompts_per_iteration=2, iterations=3, evaluate_every=2, evaluate_on=part)
    frame = train(task, warm_start(), config).frame
    assert frame["accuracy"].notna().tolist() == [True, False, True, True]
    assert measured == [getattr(task, part)] * 3


def test_more_prompts_than_problems_are_refused(letters, tiny):
    with pytest.raises(ValueError, match="prompts_per_iteration must be at most 3"):
        train(letters, tiny(), dataclasses.replace(SMALL, prompts_per_iteration=4))


def test_rows_describe_the_rollout_in_plain_numbers():
    rollout = Rollout(
        prompt_ids=torch.zeros(4, 1),
        completion_ids=torch.tensor([[0, 2, 2], [0, 1, 2], [2, 2, 2], [1, 1, 1]]),
        completion_mask=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool(),
        old_log_probs=torch.tensor([[-1.0, -1, -9], [-2, -2, -2], [-3, -9, -9], [-1, -1, -1]]),
        rewards=torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        temperature=1.0,
    )
    assert describe(rollout, eos_id=2) == pytest.approx(
        {"reward": 0.25, "flat_groups": 0.5, "entropy": 14 / 9, "completion_length": 9 / 4, "unfinished": 0.25}
    )
