"""DPO: the loss against its closed forms and TRL's, log-probs of whole completions, and a run that keeps its reference."""

import dataclasses
import math
import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_core import Problem, sample_groups, success_probability, warm_start
from grpo_core.advantages import leave_one_out_advantages
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.dpo import DPOConfig, completion_log_probs, dpo_loss, pair_log_probs, train_dpo
from grpo_core.rivals.pairs import make_pairs
from grpo_core.rivals.reinforce import reinforce_loss

SMALL = Budget(prompts_per_iteration=3, group_size=8, iterations=2, gradient_steps=2, temperature=1.3, max_new_tokens=3)
log_probs = st.floats(-50, 0)
rows = st.lists(st.tuples(log_probs, log_probs, log_probs, log_probs), min_size=1, max_size=5)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


# ---- the loss


def test_a_policy_that_is_the_reference_has_loss_ln_2():
    chosen, rejected = double([-3.0, -7.0]), double([-1.0, -20.0])
    for beta in (0.1, 1.0, 10.0):
        assert dpo_loss(chosen, rejected, chosen, rejected, beta).item() == pytest.approx(0.693147, abs=1e-6)


def test_a_known_pair():
    """Sums: chosen −10 (of 5 tokens) against −10.5, rejected −12 (of 2 tokens) against −11: margin 1.5."""
    assert dpo_loss(*double([[-10], [-12], [-10.5], [-11]]), beta=0.1).item() == pytest.approx(0.620957, abs=1e-6)
    assert dpo_loss(*double([[-12], [-10], [-11], [-10.5]]), beta=0.1).item() == pytest.approx(0.770957, abs=1e-6)


@given(rows, st.floats(0.01, 20))
def test_loss_and_gradient_are_those_of_the_paper(pairs, beta):
    """Equation 7 as written, and its gradient: beta · sigmoid(− margin), up for the chosen one, down for the rejected one."""
    columns = [double(column).requires_grad_() for column in zip(*pairs)]
    loss = dpo_loss(*columns, beta)
    gradients = torch.autograd.grad(loss, columns)
    margins = [beta * ((c - rc) - (r - rr)) for c, r, rc, rr in pairs]
    by_hand = [math.log1p(math.exp(-m)) if m > 0 else -m + math.log1p(math.exp(m)) for m in margins]
    assert loss.item() == pytest.approx(sum(by_hand) / len(pairs))
    slopes = double([-beta / (1 + math.exp(min(m, 700))) / len(pairs) for m in margins])
    for gradient, sign in zip(gradients, (1, -1, -1, 1)):
        assert_close(gradient, sign * slopes)


def test_gradient_agrees_with_finite_differences():
    columns = [
        torch.randn(4, generator=torch.Generator().manual_seed(i), dtype=torch.float64).requires_grad_() for i in range(4)
    ]
    assert torch.autograd.gradcheck(lambda *x: dpo_loss(*x, beta=0.7), columns)


@pytest.mark.parametrize("margin, loss, slope", [(1e4, 0.0, 0.0), (-1e4, 1e4, -1.0), (200.0, 0.0, 0.0), (-200.0, 200.0, -1.0)])
def test_far_from_the_reference_loss_and_gradient_stay_finite(margin, loss, slope):
    chosen = torch.tensor([margin], requires_grad=True)
    value = dpo_loss(chosen, *torch.zeros(3, 1), beta=1.0)
    value.backward()
    assert (value.item(), chosen.grad.item()) == (pytest.approx(loss, abs=1e-6), pytest.approx(slope, abs=1e-6))


def test_only_the_difference_counts_so_both_may_fall():
    columns = double([[-10, -3], [-12, -5], [-10.5, -3], [-11, -4]])
    lower = columns - double([[50], [50], [0], [0]])
    assert_close(dpo_loss(*columns, beta=0.3), dpo_loss(*lower, beta=0.3))


def test_one_pair_pulls_as_leave_one_out_does_on_a_group_of_two():
    """At the reference, up to the factor beta / 2 and REINFORCE's division by the tokens."""
    chosen, rejected, mask = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0)).double()
    chosen, rejected, mask = chosen.requires_grad_(), rejected.requires_grad_(), torch.ones(2, 4)
    sums = chosen.sum(1), rejected.sum(1)
    dpo = torch.autograd.grad(dpo_loss(*sums, *(x.detach() for x in sums), beta=0.6), (chosen, rejected))
    advantages = leave_one_out_advantages(double([[1, 0]]))[0]
    reinforce = torch.autograd.grad(reinforce_loss(torch.cat([chosen, rejected]), advantages, mask), (chosen, rejected))
    for ours, theirs in zip(dpo, reinforce):
        assert_close(ours, 0.3 * 8 * theirs)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_a_beta_that_makes_no_sense_is_refused(beta):
    with pytest.raises(ValueError, match="beta must be"):
        dpo_loss(*torch.zeros(4, 1), beta=beta)
    with pytest.raises(ValueError, match="beta must be"):
        DPOConfig(beta=beta)


@pytest.mark.parametrize("shapes", [[(3, 2)] * 4, [(3,), (3,), (3,), (1,)], [(3,), (3, 1), (3,), (3,)], [()] * 4, [(0,)] * 4])
def test_log_probs_of_tokens_or_of_other_pairs_are_refused(shapes):
    with pytest.raises(ValueError, match="one log-prob for each completion"):
        dpo_loss(*map(torch.zeros, shapes), beta=1.0)


# ---- log-probs of whole completions


@pytest.mark.parametrize("prompt", ["ab", "bba"])
def test_log_prob_of_a_completion_is_the_sum_over_its_tokens(letters, tiny, prompt):
    policy, (ids, mask) = tiny(), letters.completions()
    expected = torch.stack([row[real].sum() for row, real in zip(letters.log_probs(policy, prompt), mask)])
    prompts = torch.tensor([letters.encode(prompt)]).expand(len(ids), -1)
    found = completion_log_probs(policy, prompts, ids, mask)
    assert_close(found, expected)
    assert found.exp().sum().item() == pytest.approx(1.0)  # They are all that the policy can say, so nothing is left out.


def test_what_stands_behind_the_eos_is_never_read(letters, tiny, gradient):
    policy, (ids, mask) = tiny(), letters.completions()
    prompts = torch.tensor([letters.encode("ab")]).expand(len(ids), -1)
    garbage = torch.where(mask, ids, torch.randint(3, ids.shape, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(garbage, ids)
    found = [completion_log_probs(policy, prompts, x, mask) for x in (ids, garbage)]
    assert_close(*found)
    weights = torch.arange(len(ids), dtype=torch.float64)
    assert_close(*(gradient(weights @ x, policy) for x in found))


def test_prompts_of_different_lengths_score_as_one_pair_at_a_time(letters, tiny, gradient):
    policy = tiny()
    pairs = make_pairs([sample_groups(policy, letters, letters.problems, 16, 1.5, generator=torch.Generator().manual_seed(0))])
    chosen, rejected = pair_log_probs(policy, pairs)
    alone = [[], []]
    for k, real in enumerate(pairs.prompt_mask):
        pair = pairs[k : k + 1]
        ids = (pair.chosen_ids, pair.rejected_ids), (pair.chosen_mask, pair.rejected_mask)
        for found, completion, mask in zip(alone, *ids):
            found.append(completion_log_probs(policy, pair.prompt_ids[:, real], completion[:, mask[0]], mask[:, mask[0]]))
    assert len(set(pairs.prompt_mask.sum(1).tolist())) > 1
    assert_close(chosen, torch.cat(alone[0])), assert_close(rejected, torch.cat(alone[1]))
    losses = [dpo_loss(c, r, c.detach() - 1, r.detach(), 0.5) for c, r in ((chosen, rejected), map(torch.cat, alone))]
    assert_close(*(gradient(loss, policy) for loss in losses))


# ---- training


def test_first_step_starts_at_ln_2_and_the_ledger_counts_what_was_done(letters, tiny):
    ledger = train_dpo(letters, tiny(), SMALL, DPOConfig(1e-3, 0.5))
    start, first, second = ledger.rows
    assert first["loss"] == pytest.approx(math.log(2)) and second["loss"] < first["loss"]
    assert (first["margin"], first["chosen"], first["rejected"]) == pytest.approx((0, 0, 0))
    assert second["margin"] == pytest.approx(second["chosen"] - second["rejected"]) and second["margin"] > 0
    assert (start["completions"], first["completions"], second["completions"]) == (0, 48, 48)
    assert (second["verdicts"], second["answers"], second["gradient_steps"]) == (48, 0, 2)


def test_tokens_are_those_of_the_pairs(letters, tiny, monkeypatch):
    seen = []
    monkeypatch.setattr("grpo_core.rivals.dpo.make_pairs", lambda rollouts: seen.append(make_pairs(rollouts)) or seen[0])
    budget = dataclasses.replace(SMALL, group_size=32)
    ledger = train_dpo(letters, tiny(), dataclasses.replace(budget, prompts_per_iteration=2), DPOConfig())
    pairs = seen[0]
    batch = min(len(pairs), 32)
    lengths = (pairs.chosen_mask.sum(1) + pairs.rejected_mask.sum(1)).sort().values
    assert 2 * lengths[:batch].sum() <= ledger.rows[-1]["tokens"] <= 2 * lengths[-batch:].sum()


def test_training_raises_the_right_answers_and_repeats_exactly(letters, tiny):
    budget = Budget(3, 16, 10, gradient_steps=60, temperature=1.0, max_new_tokens=3)
    runs, policies = [], []
    for _ in range(2):
        policies.append(tiny())
        before = success_probability(policies[-1], letters, letters.train).mean()
        runs.append(train_dpo(letters, policies[-1], budget, DPOConfig(3e-3, 1.0)))
    assert runs[0].rows == runs[1].rows and len(runs[0].rows) == 11
    assert success_probability(policies[0], letters, letters.train).mean() > before + 0.1


def test_no_pairs_is_an_error(letters, tiny):
    letters.train = [Problem("ab", "never") for _ in range(3)]
    with pytest.raises(ValueError, match="no group has both a right and a wrong completion"):
        train_dpo(letters, tiny(), SMALL)


def test_a_small_beta_lets_the_right_completions_sink_with_the_wrong_ones(task):
    """The loss pays for the distance between the two. With a small beta it pays on when that is large already."""
    budget = Budget(iterations=4, gradient_steps=12, evaluate_on="validation")
    start, *_, loose = train_dpo(task, warm_start(), budget, DPOConfig(4e-4, beta=0.1)).rows
    tight = train_dpo(task, warm_start(), budget, DPOConfig(4e-4, beta=3.0)).rows[-1]
    assert loose["rejected"] < loose["chosen"] < -0.5 and tight["rejected"] < 0 < tight["chosen"]
    assert loose["margin"] > tight["margin"]
    assert loose["accuracy"] < start["accuracy"] - 0.1 < tight["accuracy"] - 0.2


# ---- TRL


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_loss_and_gradient_are_trls(beta):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is not installed").DPOTrainer
    scores = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    reference = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 1, 2, 3, 2, 4, 5, 1])[:, None]
    sums, ref_sums = torch.where(mask, scores, 0.0).sum(1), torch.where(mask, reference, 0.0).sum(1)
    ours = dpo_loss(*sums.chunk(2), *ref_sums.chunk(2), beta)
    theirs = trl_loss(trainer, torch.where(mask, scores, 0.0), ref_sums, mask, beta)
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours, scores), torch.autograd.grad(theirs, scores))


def trl_loss(trainer, per_token, ref_sums, mask, beta):
    """The body of TRL's trainer, on log-probs that a stand-in for its model returns; the chosen rows come first."""

    def same(x):  # There is one process only.
        return x

    outputs = SimpleNamespace(log_probs=per_token, entropy=per_token, mean_logits=per_token, is_top1=mask)
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=SimpleNamespace(device="cpu", gather_for_metrics=same, gather=same),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=beta,
        loss_types=["sigmoid"], loss_weights=[1.0], use_weighting=False, _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )  # fmt: skip
    mask = torch.cat([torch.zeros(len(mask), 1), mask], dim=1).long()  # TRL's mask begins with the prompt.
    ref_chosen, ref_rejected = ref_sums.chunk(2)
    inputs = {
        "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected,
    }  # fmt: skip
    return trainer._compute_loss(stand_in, lambda **_: outputs, inputs, return_outputs=False)
