"""The reward model: read at the last real token of each row, trained by the gradient of Bradley and Terry, honest on itself."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from grpo_core.rivals.pairs import Pairs, make_pairs
from grpo_core.rivals.reward_model import (
    RewardModel,
    RewardModelConfig,
    calibration,
    last_positions,
    pair_accuracy,
    pair_loss,
    scalar_network,
    standardize,
    train_reward_model,
)
from grpo_core.rollout import sample_groups

A, B, EOS = range(3)


@pytest.fixture
def model(tiny):
    """A reward model with a head that has opinions."""
    made = RewardModel(tiny())
    torch.nn.init.normal_(made.network.head.weight, generator=torch.Generator().manual_seed(1))
    return made.requires_grad_(False)


@pytest.fixture
def rollout(letters, tiny):
    """Prompts of three lengths; completions with and without EOS, and EOS as the padding on both sides."""
    return sample_groups(tiny(1), letters, letters.problems, 8, 1.3, generator=torch.Generator().manual_seed(3))


def inputs(rollout, rows=slice(None)):
    sides = rollout.prompt_ids, rollout.completion_ids, rollout.completion_mask, rollout.prompt_mask
    return [x[rows] for x in sides]


def first_letter_pairs(prompts):
    """A taste that can be learned: completions that begin with a are right, with b wrong. What follows is mixed."""
    tails = torch.tensor([[x, y] for x in range(3) for y in range(3)])
    prompt_ids = torch.tensor(prompts).repeat_interleave(len(tails), dim=0)
    tails = tails.repeat(len(prompts), 1)
    chosen, rejected = (torch.cat([torch.full((len(tails), 1), first), tails], dim=1) for first in (A, B))
    masks = [(side == EOS).cumsum(1) - (side == EOS).long() == 0 for side in (chosen, rejected)]
    return Pairs(prompt_ids, chosen, rejected, *masks)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[0, 0, 1, 1], [1, 1, 0, 0]], [3, 1]),
        ([[1, 1, 1, 1]], [3]),
        ([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]], [1, 0, 3]),
        ([[0, 1, 1, 0, 1, 0]], [4]),
    ],
)
def test_last_position_comes_from_the_mask_wherever_the_padding_is(mask, expected):
    assert last_positions(torch.tensor(mask)).tolist() == expected
    assert last_positions(torch.tensor(mask).bool()).tolist() == expected


def test_last_position_of_ids_whose_padding_is_0():
    assert last_positions(torch.tensor([[0, 0, 5, 6], [5, 6, 0, 0]]) != 0).tolist() == [3, 1]


def test_a_row_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no real token"):
        last_positions(torch.tensor([[1, 0], [0, 0]]))


def test_score_is_read_at_the_last_real_token_of_the_row_alone(model, rollout):
    """The oracle knows neither batch nor padding: one text, its own tokens, the number at the end. EOS pads here too."""
    expected, ends = [], set()
    for prompt, completion, mask, prompt_mask in zip(*inputs(rollout)):
        text = torch.cat([prompt[prompt_mask], completion[mask]])
        ends.add((len(text), text[-1].item() == EOS))
        expected.append(model.network(text[None])[0, -1, 0])
    assert len(ends) > 4 and {finished for _, finished in ends} == {True, False}
    assert_close(model(*inputs(rollout)), torch.stack(expected))


def test_the_worked_prompts_padded_left_and_right_score_as_each_alone(model):
    """Both texts are the same two tokens, so both scores must be the same, whichever side is filled."""
    text, filling = [[A, B]], [[EOS, EOS]]
    left = model(
        torch.tensor([filling[0] + [A]]), torch.tensor([[B]]), torch.tensor([[1]]), prompt_mask=torch.tensor([[0, 0, 1]])
    )
    right = model(torch.tensor([[A]]), torch.tensor([[B] + filling[0]]), torch.tensor([[1, 0, 0]]))
    alone = model.network(torch.tensor(text))[:, -1, 0]
    assert_close(left, alone)
    assert_close(right, alone)


def test_score_does_not_depend_on_batch_or_filling(model, rollout):
    scores = model(*inputs(rollout))
    assert scores.std() > 0.1
    for rows in (slice(0, 1), slice(5, 7), torch.arange(len(scores)).flip(0)):
        assert_close(model(*inputs(rollout, rows)), scores[rows])
    prompt_ids, completion_ids, mask, prompt_mask = inputs(rollout)
    other = torch.where(mask, completion_ids, A), torch.where(prompt_mask, prompt_ids, B)
    assert_close(model(other[1], other[0], mask, prompt_mask), scores)


def test_it_starts_from_a_copy_of_the_policy_without_an_opinion(tiny, rollout):
    policy = tiny().requires_grad_(False)
    model = RewardModel(policy)
    body, copied = policy.state_dict(), model.network.state_dict()
    for name in body:
        if not name.startswith("head"):
            assert torch.equal(body[name], copied[name]) and body[name].data_ptr() != copied[name].data_ptr()
    assert (model(*inputs(rollout)) == 0).all()
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("margin", "loss", "slope"),
    [(0, math.log(2), -0.5), (2, math.log1p(math.exp(-2)), -0.1192029), (-2, math.log1p(math.exp(2)), -0.8807971)]
    + [(1000, 0, 0), (-1000, 1000, -1)],
)
def test_pair_loss_and_its_slope(margin, loss, slope):
    """−log sigmoid(m), whose slope is −sigmoid(−m): finite on both far ends."""
    m = torch.tensor([float(margin)], dtype=torch.float64, requires_grad=True)
    found = pair_loss(m)
    found.backward()
    assert_close(found.item(), float(loss))
    assert_close(m.grad.item(), float(slope), atol=1e-7, rtol=0)


def test_pair_loss_is_the_mean_of_the_pairs():
    m = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert_close(pair_loss(m), torch.stack([pair_loss(x[None]) for x in m]).mean())
    pair_loss(m).backward()
    assert_close(m.grad, -1 / (1 + m.detach().exp()) / 7)


def test_gradient_lifts_the_chosen_and_lowers_the_rejected_by_the_closed_form(model, gradient):
    model.requires_grad_(True)
    pairs = first_letter_pairs([[A, A], [A, B]])
    chosen = model(pairs.prompt_ids, pairs.chosen_ids, pairs.chosen_mask)
    rejected = model(pairs.prompt_ids, pairs.rejected_ids, pairs.rejected_mask)
    weight = -1 / (1 + (chosen - rejected).detach().exp()) / len(pairs)
    expected = gradient((weight * chosen).sum(), model) - gradient((weight * rejected).sum(), model)
    assert expected.norm() > 0.01
    assert_close(gradient(pair_loss(model.margins(pairs)), model), expected)


@pytest.mark.parametrize("swapped", [False, True])
def test_training_learns_what_can_be_learned_and_carries_it_to_other_prompts(tiny, swapped):
    policy, train, held_out = tiny(), first_letter_pairs([[A, A], [A, B], [B, A]]), first_letter_pairs([[B, B]])
    if swapped:
        train, held_out = (
            Pairs(p.prompt_ids, p.rejected_ids, p.chosen_ids, p.rejected_mask, p.chosen_mask) for p in (train, held_out)
        )
    before = copy.deepcopy(policy.state_dict())
    model = train_reward_model(policy, train, RewardModelConfig(learning_rate=1e-2, epochs=30, batch_size=9))
    assert pair_accuracy(model, held_out).low > 0.5
    assert pair_loss(model.margins(train)) < 0.2
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())


def test_training_repeats_itself_and_depends_on_its_seed(tiny):
    pairs, config = first_letter_pairs([[A, A], [A, B]]), RewardModelConfig(epochs=2, batch_size=4)
    margins = [train_reward_model(tiny(), pairs, config, seed).margins(pairs) for seed in (0, 0, 1)]
    assert torch.equal(margins[0], margins[1]) and not torch.equal(margins[0], margins[2])


def test_steps_counts_the_steps_that_training_takes(tiny, monkeypatch):
    counted = []
    monkeypatch.setattr("grpo_core.rivals.reward_model.gradient_step", lambda *args: counted.append(args))
    config = RewardModelConfig(epochs=3, batch_size=4)
    train_reward_model(tiny(), first_letter_pairs([[A, A]]), config)  # Nine pairs: two full batches and a small one.
    assert len(counted) == config.steps(9) == 9


def test_standardized_scores_have_mean_0_and_std_1_and_the_same_order(model, rollout):
    pairs = make_pairs([rollout])
    before = model.margins(pairs), pair_accuracy(model, pairs)
    standardize(model, pairs)
    sides = (pairs.chosen_ids, pairs.chosen_mask), (pairs.rejected_ids, pairs.rejected_mask)
    scores = torch.cat([model(pairs.prompt_ids, *side, pairs.prompt_mask) for side in sides])
    assert_close(scores.mean().item(), 0.0, atol=1e-9, rtol=0)
    assert_close(scores.square().mean().item(), 1.0)
    ratio = model.margins(pairs) / before[0]
    assert ratio.min() > 0
    assert_close(ratio, ratio[0].expand_as(ratio))
    assert pair_accuracy(model, pairs) == before[1]


def test_a_model_without_an_opinion_cannot_be_standardized_and_is_never_right(tiny, rollout):
    model, pairs = RewardModel(tiny()), make_pairs([rollout])
    assert pair_accuracy(model, pairs) == 0
    with pytest.raises(ValueError, match="train it first"):
        standardize(model, pairs)


def with_margins(margins):
    return SimpleNamespace(margins=lambda pairs: margins), range(len(margins))


def test_pair_accuracy_counts_the_margins_above_0():
    assert pair_accuracy(*with_margins(torch.tensor([1.0, -1.0, 0.0, 3.0]))) == 0.5


@pytest.mark.parametrize(("scale", "sign"), [(1, 0), (4, -1), (0.25, 1)])
def test_calibration_tells_a_model_that_knows_from_one_that_boasts(scale, sign):
    """Truth: with margin m the preferred completion is right with probability sigmoid(|m|). The model says scale · m."""
    generator = torch.Generator().manual_seed(0)
    margins = 2 * torch.randn(20_000, generator=generator)
    right = torch.rand(20_000, generator=generator) < margins.abs().sigmoid()
    table = calibration(*with_margins(scale * torch.where(right, margins.abs(), -margins.abs())), bins=5)
    assert table.pairs.sum() == 20_000
    assert (table.predicted.diff().dropna() > 0).all() and table.predicted.between(0.5, 1).all()
    gap = (table.observed - table.predicted)[table.pairs > 200]
    assert (gap.abs() < 0.03).all() if sign == 0 else (sign * gap > 0.02).sum() >= len(gap) - 1


def test_calibration_by_hand():
    margins = torch.tensor([0.1, -0.1, 100.0, 100.0, -100.0, 0.0])
    table = calibration(*with_margins(margins), bins=2)
    assert table.pairs.tolist() == [3, 3]
    assert_close(table.observed.tolist(), [1 / 3, 2 / 3])
    assert_close(table.predicted.tolist(), [(0.5 + 2 / (1 + math.exp(-0.1))) / 3, 1.0])
    with pytest.raises(ValueError, match="at least 1"):
        calibration(*with_margins(margins), bins=0)


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"epochs": 1.5}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RewardModelConfig(**wrong)


def test_scalar_network_gives_one_number_for_each_token_in_the_type_of_the_policy(tiny):
    found = scalar_network(tiny())(torch.tensor([[A, B, A]]))
    assert found.shape == (1, 3, 1) and found.dtype == torch.float64
