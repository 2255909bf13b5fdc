"""Imitation: cross-entropy by hand, only right answers are kept, each counted; and imitating everything teaches nothing."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_core import Problem, greedy_accuracy, sample_groups, success_probability, token_log_probs, warm_start
from grpo_core.rivals import imitation
from grpo_core.rivals.budget import Budget, Ledger, shuffled_batches
from grpo_core.rivals.imitation import (
    Demonstration,
    ExpertIterationConfig,
    SupervisedConfig,
    demonstrations_of,
    imitate,
    imitation_loss,
    train_expert_iteration,
    train_supervised,
)
from grpo_core.rivals.reinforce import reinforce_loss

SMALL = Budget(prompts_per_iteration=3, group_size=16, iterations=4, gradient_steps=8, temperature=1.3, max_new_tokens=3)
SHORT = Budget(iterations=4, gradient_steps=12, evaluate_on="validation")


# ---- the loss


def test_loss_is_the_cross_entropy_of_the_tokens_inside_the_mask():
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    ids, mask = (
        torch.tensor([[1, 2, 3, 4], [0, 1, 0, 0], [4, 0, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
    )
    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    expected = F.cross_entropy(logits.flatten(0, 1), ids.masked_fill(mask == 0, -100).flatten())
    assert_close(imitation_loss(log_probs, mask), expected)
    assert_close(*(torch.autograd.grad(x, logits, retain_graph=True) for x in (imitation_loss(log_probs, mask), expected)))
    assert_close(imitation_loss(log_probs, mask), reinforce_loss(log_probs, torch.ones(3), mask))


def test_nothing_is_read_behind_the_eos():
    log_probs = torch.tensor([[-1.0, -torch.inf], [-3.0, torch.nan]], requires_grad=True)
    loss = imitation_loss(log_probs, torch.tensor([[True, False], [True, False]]))
    loss.backward()
    assert loss.item() == 2.0
    assert_close(log_probs.grad, torch.tensor([[-0.5, 0], [-0.5, 0]]))


def test_a_step_goes_down_the_mean_over_all_tokens_one_demonstration_at_a_time(letters, tiny, gradient):
    """Prompts and completions of different lengths, EOS included, against one text after the other without any padding."""
    policy, shown = tiny(), [("ab", "a;"), ("bba", "bb;"), ("b", ";"), ("b", "bab")]
    rows = [
        token_log_probs(policy, *(torch.tensor([letters.encode(text)]) for text in (prompt, completion)))[0]
        for prompt, completion in shown
    ]
    loss = -torch.cat(rows).mean()
    direction = gradient(loss, policy)
    weights = torch.cat([weight.flatten() for weight in policy.parameters()]).detach()
    ledger, optimizer = (
        Ledger(letters, policy, dataclasses.replace(SMALL, max_grad_norm=1e9)),
        torch.optim.SGD(policy.parameters(), 0.1),
    )
    value = imitate(policy, letters, [Demonstration(*pair) for pair in shown], ledger, optimizer)
    assert value == pytest.approx(loss.item()) and ledger.spent["tokens"] == 2 + 3 + 1 + 3
    moved = torch.cat([weight.flatten() for weight in policy.parameters()]).detach() - weights
    assert_close(moved, -0.1 * direction)


# ---- what is imitated


def test_each_right_completion_is_kept_once_and_no_wrong_one(letters, tiny):
    policy, generator = tiny(), torch.Generator().manual_seed(0)
    rollouts = [sample_groups(policy, letters, letters.problems, 32, 1.5, generator=generator) for _ in range(2)]
    assert all(2 < right < 64 for right in sum(rollout.rewards.sum(1) for rollout in rollouts).tolist())
    assert sorted(demonstrations_of(rollouts)) == sorted((prompt, answer + ";") for prompt, answer in letters.problems)
    everything = demonstrations_of(rollouts, "all")
    assert [completion for _, completion in everything] == [text for rollout in rollouts for text in rollout.texts]
    assert [prompt for prompt, _ in everything] == [problem.prompt for problem in letters.problems for _ in range(32)] * 2


def test_several_right_completions_of_a_prompt_are_all_kept(letters, tiny):
    letters.verify = lambda completion, answer: float(completion.endswith(";"))
    rollout = sample_groups(tiny(), letters, letters.problems, 32, 1.5, generator=torch.Generator().manual_seed(0))
    prompts = [problem.prompt for problem in letters.problems for _ in range(32)]
    assert set(demonstrations_of([rollout])) == {pair for pair in zip(prompts, rollout.texts) if pair[1].endswith(";")}


@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 12))
def test_batches_go_through_all_rows_before_any_comes_again(count, batch_size, batches):
    size = min(batch_size, count)
    found = [rows.tolist() for rows in shuffled_batches(count, batch_size, batches, torch.Generator().manual_seed(0))]
    assert [len(rows) for rows in found] == [size] * batches
    per_epoch = count // size
    for first in range(0, batches, per_epoch):
        seen = [row for rows in found[first : first + per_epoch] for row in rows]
        assert len(set(seen)) == len(seen) and set(seen) <= set(range(count))


def test_epochs_are_shuffled_anew():
    found = [rows.tolist() for rows in shuffled_batches(50, 50, 2, torch.Generator().manual_seed(0))]
    assert found[0] != found[1] != list(range(50)) and sorted(found[0]) == sorted(found[1]) == list(range(50))


# ---- the control


def test_imitating_all_of_ones_own_completions_has_no_expected_gradient(letters, tiny, gradient):
    """Exact, over all completions. Among them, the right ones alone pull uphill."""
    policy, problem, (ids, mask) = tiny(), letters.problems[1], letters.completions()
    prompt = torch.tensor([letters.encode(problem.prompt)]).expand(len(ids), -1)
    right = torch.tensor([letters.verify(letters.decode(row.tolist()), problem.answer) for row in ids])

    def log_probs():
        return torch.where(mask, token_log_probs(policy, prompt, ids), 0.0).sum(1)

    chance = log_probs().exp().detach()
    assert gradient(chance @ log_probs(), policy).abs().max() < 1e-12
    uphill = gradient((chance * right) @ log_probs(), policy)
    assert_close(uphill, gradient((log_probs().exp() * right).sum(), policy))
    assert uphill.norm() > 1e-3


def test_filtered_self_training_helps_and_unfiltered_does_not(task):
    policies = {keep: warm_start() for keep in ("right", "all")}
    start = greedy_accuracy(policies["all"], task, task.validation)
    ledgers = {
        keep: train_expert_iteration(task, policy, SHORT, ExpertIterationConfig(1, keep, 4e-4))
        for keep, policy in policies.items()
    }
    end = {keep: ledger.rows[-1]["accuracy"] for keep, ledger in ledgers.items()}
    assert end["right"] > start + 0.1
    assert abs(end["all"] - start) < 0.1
    assert ledgers["all"].rows[-1]["verdicts"] == 0 and ledgers["right"].rows[-1]["verdicts"] == SHORT.completions


# ---- training


def test_expert_iteration_samples_each_round_from_the_policy_of_the_round_before(letters, tiny, monkeypatch):
    log, sample, step = [], imitation.sample_iteration, imitation.imitate
    monkeypatch.setattr(imitation, "sample_iteration", lambda *a: log.append(f"sample {a[-1]}") or sample(*a))
    monkeypatch.setattr(imitation, "imitate", lambda *a: log.append("step") or step(*a))
    ledger = train_expert_iteration(letters, tiny(), SMALL, ExpertIterationConfig(2, "right", 1e-3))
    assert log == ["sample 1", "sample 2", *["step"] * 4, "sample 3", "sample 4", *["step"] * 4]
    assert ledger.frame["completions"].tolist() == [0, 96, 96, 192, 192]
    assert ledger.frame["gradient_steps"].tolist() == [0, 2, 4, 6, 8]
    last = ledger.rows[-1]
    assert (last["verdicts"], last["answers"]) == (192, 0) and last["tokens"] <= 8 * 48 * 3


def test_supervised_fine_tuning_sees_as_many_answers_as_the_others_sample(letters, tiny, monkeypatch):
    seen, step = [], imitation.imitate
    monkeypatch.setattr(imitation, "imitate", lambda *a: seen.append(a[2]) or step(*a))
    letters.train = [Problem(a + b, b) for a in ("a", "b") for b in ("a", "b")] * 12
    ledger = train_supervised(letters, tiny(), SMALL, SupervisedConfig(1e-3))
    last = ledger.rows[-1]
    assert (last["completions"], last["verdicts"], last["answers"], last["gradient_steps"]) == (0, 0, 192, 8)
    assert [len(batch) for batch in seen] == [24] * 8 and last["tokens"] == 2 * 192
    assert all(completion == prompt[-1] + ";" for batch in seen for prompt, completion in batch)
    assert len(ledger.rows) == 5


@pytest.mark.parametrize(
    "train, config", [(train_expert_iteration, ExpertIterationConfig), (train_supervised, SupervisedConfig)]
)
def test_training_finds_the_answers_and_repeats_exactly(letters, tiny, train, config):
    budget, runs, policies = dataclasses.replace(SMALL, gradient_steps=40), [], []
    for _ in range(2):
        policies.append(tiny())
        before = success_probability(policies[-1], letters, letters.train).mean()
        runs.append(train(letters, policies[-1], budget, config(learning_rate=1e-2)))
    assert runs[0].rows == runs[1].rows
    assert success_probability(policies[0], letters, letters.train).mean() > before + 0.1


# ---- errors


def test_a_round_without_a_right_completion_is_an_error(letters, tiny):
    letters.train = [Problem("ab", "never") for _ in range(3)]
    with pytest.raises(ValueError, match="no completion of this round is right: sample more"):
        train_expert_iteration(letters, tiny(), SMALL)


@pytest.mark.parametrize("setting", [{"rounds": 0}, {"rounds": 2.0}, {"keep": "wrong"}, {"learning_rate": 0.0}])
def test_settings_that_make_no_sense_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        ExpertIterationConfig(**setting)


def test_rounds_must_divide_the_iterations(letters, tiny):
    with pytest.raises(ValueError, match="rounds must divide iterations, got 3 and 4"):
        train_expert_iteration(letters, tiny(), SMALL, ExpertIterationConfig(3))
