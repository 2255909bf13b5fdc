"""PPO: the critic sees only what came before, the losses by hand and against GRPO's, the exact gradient, and training."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from grpo_core import (
    GRPOConfig,
    Rollout,
    group_advantages,
    grpo_loss,
    kl_estimate,
    sample_groups,
    token_log_probs,
    train,
    warm_start,
)
from grpo_core.rivals.budget import Budget, Ledger, adamw
from grpo_core.rivals.gae import gae
from grpo_core.rivals.ppo import (
    Critic,
    PPOConfig,
    clipped_value_loss,
    completion_scores,
    ppo_loss,
    ppo_update,
    token_rewards,
    train_ppo,
    train_ppo_with_reward_model,
)
from grpo_core.rivals.reward_model import RewardModelConfig

NAN = float("nan")
SMALL = Budget(prompts_per_iteration=2, group_size=8, iterations=3, gradient_steps=6, max_new_tokens=3)


@pytest.fixture
def rollout(letters, tiny):
    """Sampled by another policy than `tiny()`, so that the ratio is not 1; prompts of three lengths."""
    return sample_groups(tiny(1), letters, letters.problems, 4, 1.3, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def critic(tiny):
    """A critic with opinions, unlike a fresh one."""
    made = Critic(tiny(2))
    torch.nn.init.normal_(made.network.head.weight, generator=torch.Generator().manual_seed(5))
    return made


def scored(policy, rollout):
    return token_log_probs(policy, rollout.prompt_ids, rollout.completion_ids, rollout.temperature, rollout.prompt_mask)


def noise(rollout, seed=0):
    shape, generator = rollout.completion_ids.shape, torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def same_weights(module, state):
    return all(torch.equal(weight, state[name]) for name, weight in module.state_dict().items())


def test_value_is_read_before_each_token_in_each_row_alone(critic, rollout):
    """The oracle reads one row's prompt and the tokens before t, without padding, and takes the last number."""
    expected = []
    for prompt, completion, prompt_mask in zip(rollout.prompt_ids, rollout.completion_ids, rollout.prompt_mask):
        texts = [torch.cat([prompt[prompt_mask], completion[:t]]) for t in range(len(completion))]
        expected.append(torch.stack([critic.network(text[None])[0, -1, 0] for text in texts]))
    values = critic.values(rollout.prompt_ids, rollout.completion_ids, rollout.prompt_mask)
    assert_close(values, torch.stack(expected))
    assert values.std() > 0.1


def test_a_fresh_critic_says_0_and_shares_nothing_with_the_policy(tiny, rollout):
    policy = tiny()
    critic = Critic(policy)
    assert (critic.values(rollout.prompt_ids, rollout.completion_ids, rollout.prompt_mask) == 0).all()
    own = {weight.data_ptr() for weight in policy.parameters()}
    assert own.isdisjoint(weight.data_ptr() for weight in critic.parameters())


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (0.1, 1.0, 0.81, -0.9),  # Inside the band: the plain squared error.
        (-0.1, -1.0, 0.81, 0.9),
        (0.5, 1.0, 0.64, 0.0),  # Moved far enough toward the target: nothing more to gain.
        (-0.5, -1.0, 0.64, 0.0),
        (-0.5, 1.0, 2.25, -1.5),  # Moved far the wrong way: still punished, still pulled back.
        (0.5, -1.0, 2.25, 1.5),
        (1.0, 0.3, 0.49, 0.7),  # Overshot.
        (-1.0, -0.3, 0.49, -0.7),
    ],
)
def test_value_loss_and_slope_on_both_sides_of_the_band(value, target, loss, slope):
    value = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, target = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[target]], dtype=torch.float64)
    found = clipped_value_loss(value, old, target, torch.ones(1, 1), 0.2)
    found.backward()
    assert_close(found.item(), loss / 2)
    assert_close(value.grad.item(), slope)
    moved = clipped_value_loss(value + 3, old + 3, target + 3, torch.ones(1, 1), 0.2)
    assert_close(moved, found)


def test_losses_never_read_behind_the_end(rollout, tiny):
    """Not for the value, nor for the gradient, which a nan would reach through a product with 0."""
    mask = rollout.completion_mask
    assert not mask.all()
    clean = [noise(rollout, seed) for seed in range(4)]
    losses, slopes = [], []
    for filling in (0.0, NAN, float("inf")):
        a, b, c, d = (torch.where(mask, x, filling) for x in clean)
        a.requires_grad_()
        spoiled = replace(rollout, old_log_probs=b)
        found = ppo_loss(a, spoiled, c, d, PPOConfig()) + clipped_value_loss(a, b, c, mask, 0.2)
        losses.append(found.detach())
        slopes.append(torch.autograd.grad(found, a)[0])
    assert math.isfinite(losses[0])
    for loss, slope in zip(losses[1:], slopes[1:]):
        assert_close(loss, losses[0])
        assert_close(slope, slopes[0])


def test_value_loss_is_the_mean_over_the_real_tokens(rollout):
    values, old, target = (noise(rollout, seed) for seed in range(3))
    mask = rollout.completion_mask
    found = clipped_value_loss(values, old, target, mask, 1e9)  # So wide a band that it never binds.
    assert_close(found, ((values - target)[mask] ** 2).mean() / 2)


@pytest.mark.parametrize("beta", [0.0, 0.08])
def test_with_the_group_s_advantages_it_is_the_loss_of_grpo(rollout, tiny, gradient, beta):
    """Value and gradient: only the origin of the advantages is another."""
    policy, ref = tiny(0), scored(tiny(4), rollout).detach()
    per_token = group_advantages(rollout.rewards).flatten().unsqueeze(1).expand(rollout.completion_ids.shape).double()
    theirs, _ = grpo_loss(scored(policy, rollout), rollout, ref, GRPOConfig(beta=beta))
    ours = ppo_loss(scored(policy, rollout), rollout, per_token, ref, PPOConfig(beta=beta))
    assert_close(ours, theirs)
    assert_close(gradient(ours, policy), gradient(theirs, policy))


@pytest.mark.parametrize("leash", ["loss", "reward"])
def test_loss_by_hand_token_by_token(rollout, tiny, leash):
    log_probs, ref, advantages = scored(tiny(0), rollout), scored(tiny(4), rollout), noise(rollout)
    total, clipped = 0.0, 0
    for i, t in rollout.completion_mask.nonzero().tolist():
        ratio, a = (log_probs[i, t] - rollout.old_log_probs[i, t]).exp(), advantages[i, t]
        bounded = min(max(ratio, 0.9), 1.1)
        clipped += bounded * a < ratio * a
        d = ref[i, t] - log_probs[i, t]
        total -= min(ratio * a, bounded * a) - (0.5 * (d.exp() - d - 1) if leash == "loss" else 0)
    assert clipped > 0
    config = PPOConfig(leash=leash, beta=0.5, clip_eps=0.1)
    assert_close(ppo_loss(log_probs, rollout, advantages, ref, config), total / rollout.completion_mask.sum())


def test_rewards_fine_each_token_and_pay_the_score_at_the_last_real_one(rollout):
    ref, scores = noise(rollout), torch.arange(len(rollout.completion_ids)) / 2 - 3
    rewards = token_rewards(rollout, scores, ref, beta=0.3)
    for i, length in enumerate(rollout.completion_mask.sum(dim=1).tolist()):
        expected = [-0.3 * (rollout.old_log_probs[i, t] - ref[i, t]).item() for t in range(length)]
        expected[-1] += scores[i].item()
        assert_close(rewards[i, :length].tolist(), expected)
        assert (rewards[i, length:] == 0).all()
    assert_close(token_rewards(rollout, scores, ref, beta=0.0).sum(dim=1), scores.double())


def test_the_fine_in_the_reward_has_the_mean_of_the_kl(letters, tiny):
    """Over all completions, weighted by their probability: minus beta times KL(policy ‖ reference)."""
    policy, reference = tiny(0), tiny(4)
    ids, mask = letters.completions()
    p, q = letters.log_probs(policy, "ab").detach(), letters.log_probs(reference, "ab").detach()
    rollout = letters_rollout(letters, p, ids, mask)
    weight = torch.where(mask, p, 0.0).sum(dim=1).exp()
    fines = token_rewards(rollout, torch.zeros(len(ids)), q, beta=0.5).sum(dim=1)
    log_ratio = torch.where(mask, p - q, 0.0).sum(dim=1)
    assert_close((weight * fines).sum(), -0.5 * (weight * log_ratio).sum())
    assert (weight * fines).sum() < -0.01


def letters_rollout(letters, log_probs, ids, mask):
    """All completions of the prompt "ab", each once."""
    prompt_ids = torch.tensor([letters.encode("ab")]).expand(len(ids), -1)
    return Rollout(prompt_ids, ids, mask, log_probs, rewards=torch.zeros(1, len(ids)), temperature=1.0)


@pytest.mark.parametrize(("gae_lambda", "exact", "unbiased"), [(1, False, True), (0, True, True), (0, False, False)])
def test_expected_gradient_is_that_of_the_expected_reward(letters, tiny, gradient, critic, gae_lambda, exact, unbiased):
    """By enumeration of all completions. With lambda 1 any critic will do; with lambda 0 only one that is right will.

    It also pins down that the value of a state is the one before the token: a later one would be biased with lambda 1 too.
    """
    policy = tiny(0)
    ids, mask = letters.completions()
    rewards = torch.tensor([1.0, -0.5, 2.0, 0.3] * len(ids), dtype=torch.float64)[: len(ids)]
    log_probs = letters.log_probs(policy, "ab")
    old, chance = log_probs.detach(), torch.where(mask, log_probs, 0.0).sum(dim=1).exp()
    weight = chance.detach()
    assert_close(weight.sum().item(), 1.0)
    rollout = letters_rollout(letters, old, ids, mask)
    values = exact_values(ids, weight, rewards) if exact else critic.values(rollout.prompt_ids, ids).detach()
    advantages, _ = gae(token_rewards(rollout, rewards, old, 0.0), values, mask, 1.0, gae_lambda)
    weighted = advantages * weight.unsqueeze(1) * mask.sum()  # The loss divides by the number of tokens.
    expected = gradient(-(chance * rewards).sum(), policy)
    found = gradient(ppo_loss(letters.log_probs(policy, "ab"), rollout, weighted, old, PPOConfig(beta=0.0)), policy)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9) == unbiased


def exact_values(ids, weight, rewards):
    """(C, T) the exact value of each prefix: the mean reward of all completions that begin with it."""
    values = torch.zeros(ids.shape, dtype=torch.float64)
    for i in range(len(ids)):
        for t in range(ids.shape[1]):
            alike = (ids[:, :t] == ids[i, :t]).all(dim=1)
            values[i, t] = (weight * rewards)[alike].sum() / weight[alike].sum()
    return values


def test_scores_are_the_verifier_s_or_the_model_s_with_a_fixed_one_without_eos(rollout):
    def reward_model(prompt_ids, completion_ids, completion_mask, prompt_mask):
        return completion_mask.sum(dim=1) + 10.0

    assert torch.equal(completion_scores(rollout, None, 2, -1.0), rollout.rewards.flatten())
    finished = torch.tensor([text.endswith(";") for text in rollout.texts])
    assert finished.any() and not finished.all()
    expected = torch.where(finished, rollout.completion_mask.sum(dim=1) + 10.0, -1.0)
    assert torch.equal(completion_scores(rollout, reward_model, 2, -1.0), expected)


def update(letters, policy, rollout, scores, config, budget=SMALL):
    ledger, critic, reference = Ledger(letters, policy, budget), Critic(policy), copy.deepcopy(policy).requires_grad_(False)
    optimizers = adamw(policy, config.learning_rate), adamw(critic, config.critic_learning_rate)
    before = [copy.deepcopy(x.state_dict()) for x in (policy, critic, reference)]
    metrics = ppo_update(ledger, critic, reference, optimizers, rollout, scores, config)
    return ledger, metrics, [not same_weights(x, state) for x, state in zip((policy, critic, reference), before)]


def test_update_moves_policy_and_critic_but_not_the_reference_and_counts_its_steps(letters, tiny):
    policy = tiny()
    rollout = sample_groups(policy, letters, letters.problems, 4, 1.3, generator=torch.Generator().manual_seed(3))
    ledger, metrics, moved = update(letters, policy, rollout, rollout.rewards.flatten(), PPOConfig())
    assert moved == [True, True, False]
    assert ledger.spent["gradient_steps"] == 2
    assert ledger.spent["tokens"] == 2 * rollout.completion_mask.sum()
    assert metrics["kl"] == 0.0


def test_kl_is_k3_to_the_reference_of_the_policy_that_sampled(letters, tiny, rollout):
    policy = tiny(0)
    _, metrics, _ = update(letters, policy, rollout, rollout.rewards.flatten(), replace(PPOConfig(), learning_rate=1e-9))
    k3 = kl_estimate(rollout.old_log_probs, scored(policy, rollout).detach())[rollout.completion_mask]
    assert_close(metrics["kl"], k3.mean().item(), atol=1e-6, rtol=1e-6)


def test_equal_scores_teach_the_policy_nothing_and_the_critic_something(letters, tiny):
    """A fresh critic, a score of 0 and the reference itself: all advantages are 0, and so is the slope of the leash."""
    policy = tiny()
    rollout = sample_groups(policy, letters, letters.problems, 4, 1.3, generator=torch.Generator().manual_seed(3))
    _, metrics, moved = update(letters, policy, rollout, torch.zeros(12), PPOConfig())
    assert moved[0] is False and metrics["value_loss"] == 0.0
    _, metrics, moved = update(letters, policy, rollout, torch.full((12,), 0.5), PPOConfig(gae_lambda=1.0))
    assert moved[:2] == [False, True] and metrics["value_loss"] > 0.0


def test_first_completions_are_those_of_grpo(task):
    """Same seed, same start, same sampling: until the first update the two runs are one."""
    budget = Budget(prompts_per_iteration=12, iterations=1, gradient_steps=1, evaluate_on="validation", seed=3)
    config = GRPOConfig(prompts_per_iteration=12, iterations=1, inner_epochs=1, evaluate_on="validation", seed=3)
    ours, theirs = train_ppo(task, warm_start(), budget).rows, train(task, warm_start(), config).rows
    assert ours[0]["accuracy"] == theirs[0]["accuracy"]
    assert ours[1]["reward"] == ours[1]["score"] == theirs[1]["reward"]


@pytest.mark.parametrize("leash", ["loss", "reward"])
def test_training_learns(letters, tiny, leash):
    """To say "a;" to each prompt."""
    letters.train = [problem._replace(answer="a") for problem in letters.train]
    budget = replace(SMALL, prompts_per_iteration=3, group_size=16, iterations=15, gradient_steps=60, temperature=1.0)
    ledger = train_ppo(letters, tiny(), budget, PPOConfig(1e-2, critic_learning_rate=1e-2, leash=leash, beta=0.01))
    frame = ledger.frame
    assert frame.reward[1] < 0.5 and frame.reward[13:].mean() > 0.9
    assert frame.kl[1] == 0 and (frame.kl[5:] > 0).all()
    assert frame.value_loss[13:].mean() < frame.value_loss[1:4].mean() / 2
    assert ledger.rows[-1]["completions"] == ledger.rows[-1]["verdicts"] == budget.completions


def test_it_follows_the_score_and_not_the_truth(letters, tiny):
    """A reward model that likes completions that begin with b: the score rises, whatever becomes of the reward."""

    def likes_b(prompt_ids, completion_ids, completion_mask, prompt_mask):
        return (completion_ids[:, 0] == 1).double()

    budget = replace(SMALL, iterations=12, gradient_steps=48, temperature=1.0)
    config = PPOConfig(learning_rate=1e-2, leash="reward", beta=0.0, unfinished_score=0.0)
    free, leashed = (train_ppo(letters, tiny(), budget, replace(config, beta=b), likes_b).frame for b in (0.0, 3.0))
    assert free.score[1] < 0.5 and free.score[10:].mean() > 0.7
    assert leashed.score[10:].mean() < 0.6 and leashed.kl[10:].mean() < free.kl[10:].mean() / 2
    assert free.verdicts.max() == 0


def test_with_a_reward_model_half_of_the_budget_makes_pairs_and_only_that_half_is_verified(letters, tiny):
    ledger = train_ppo_with_reward_model(letters, tiny(), SMALL, reward_config=RewardModelConfig(epochs=2, batch_size=4))
    half = SMALL.completions // 2
    frame = ledger.frame
    assert frame.completions.tolist() == [0, half + 8, half + 16, half + 24] and half + 24 == SMALL.completions
    assert frame.verdicts.tolist() == [0, half, half, half]
    assert frame.gradient_steps.tolist() == [0, 2, 4, 6]
    assert (frame.reward_model_steps[1:] >= 2).all() and frame.answers.max() == 0
    assert frame[["score", "reward", "kl", "value_loss"]][1:].notna().all(axis=None)


def test_an_odd_number_of_prompts_cannot_be_halved(letters, tiny):
    with pytest.raises(ValueError, match="even, got 3"):
        train_ppo_with_reward_model(letters, tiny(), replace(SMALL, prompts_per_iteration=3))


@pytest.mark.parametrize("method", [train_ppo, train_ppo_with_reward_model])
def test_the_same_seed_gives_the_same_run(letters, tiny, method):
    first, second, other = (method(letters, tiny(), replace(SMALL, seed=seed)).frame for seed in (0, 0, 1))
    assert first.equals(second) and not first.equals(other)


@pytest.mark.parametrize(
    "wrong",
    [{"gamma": 1.1}, {"gae_lambda": -0.1}, {"gae_lambda": NAN}, {"critic_learning_rate": 0}, {"value_clip_eps": 0.0}]
    + [{"leash": "none"}, {"clip_eps": 1.0}, {"beta": -1}, {"learning_rate": 0}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PPOConfig(**wrong)
