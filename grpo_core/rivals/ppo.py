"""PPO: GRPO's clipped surrogate, with a critic where GRPO has the group's mean.

The critic is a second network, trained beside the policy to foresee the reward, and it gives each token an advantage of its
own. The reward is the verifier's, or a learned reward model's as in RLHF. Left out: minibatches, an adaptive beta, an
entropy bonus, a critic that shares its body with the policy.
"""

import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from grpo_core.config import check_fields
from grpo_core.grpo import aggregate, sample_iteration
from grpo_core.kl import kl_estimate
from grpo_core.policy import TinyGPT
from grpo_core.rivals.budget import Budget, Ledger, adamw, gradient_step
from grpo_core.rivals.gae import gae, whiten
from grpo_core.rivals.pairs import make_pairs
from grpo_core.rivals.reward_model import (
    RewardModel,
    RewardModelConfig,
    last_positions,
    scalar_network,
    standardize,
    train_reward_model,
)
from grpo_core.rollout import Rollout, shared_logits, token_log_probs
from grpo_core.surrogate import clip_range, clipped_surrogate


@dataclass(frozen=True)
class PPOConfig:
    """The settings of PPO."""

    # Step size of the policy's AdamW.
    learning_rate: float = 2e-4
    # Step size of the critic's AdamW.
    critic_learning_rate: float = 1e-3
    # What a reward one token later is worth now.
    gamma: float = 1.0
    # Between the critic's word (0) and the rewards themselves (1).
    gae_lambda: float = 0.95
    # How far from 1 a ratio is trusted.
    clip_eps: float = 0.2
    # How far from its old value a value may move at each rollout.
    value_clip_eps: float = 0.2
    # Strength of the KL leash to the start policy; 0 takes it off.
    beta: float = 0.08
    # Where the leash is: k3 in the loss as in GRPO, or k1 in each token's reward as in RLHF.
    leash: Literal["loss", "reward"] = "loss"
    # The score of a completion without EOS where a reward model scores. Its scores have mean 0 and standard deviation 1.
    unfinished_score: float = -1.0

    def __post_init__(self):
        check_fields(self)
        clip_range(self.clip_eps)
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("critic_learning_rate", "value_clip_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}: at 0 the critic learns nothing")


class Critic(nn.Module):
    """Foresees the sum of the rewards to come. Its body starts as a copy of the policy's, its values at 0."""

    def __init__(self, policy: TinyGPT):
        super().__init__()
        self.network = scalar_network(policy)

    def values(self, prompt_ids: Tensor, completion_ids: Tensor, prompt_mask: Tensor | None = None) -> Tensor:
        """(N, T): the value of the state *before* each completion token. The first has seen the prompt alone.

        Arguments as in `token_log_probs`.
        """
        return shared_logits(self.network, prompt_ids, completion_ids, prompt_mask).squeeze(-1)


def token_rewards(rollout: Rollout, scores: Tensor, ref_log_probs: Tensor, beta: float) -> Tensor:
    """(N, T): each completion's score on its last real token, and a fine on each token that strays from the reference.

    reward_t = − beta · (old_log_prob_t − ref_log_prob_t) + score at the last t

    Args:
        rollout: gives old log-probs and mask.
        scores: (N,).
        ref_log_probs: (N, T) of the reference.
        beta: 0 leaves only the score.

    Source: Ziegler et al. 2019; Ouyang et al. 2022 (InstructGPT), equation 2.
    """
    mask = rollout.completion_mask.bool()
    rewards = torch.where(mask, -beta * (rollout.old_log_probs - ref_log_probs), 0.0)
    return rewards.scatter_add(1, last_positions(mask).unsqueeze(1), scores.to(rewards).unsqueeze(1))


def ppo_loss(
    log_probs: Tensor,
    rollout: Rollout,
    advantages: Tensor,
    ref_log_probs: Tensor,
    config: PPOConfig,
) -> Tensor:
    """GRPO's loss, but with an advantage for each token.

    loss = mean over tokens of − min(ratio · A, clip(ratio) · A), plus beta · k3 if the leash is in the loss

    Args:
        log_probs: (N, T) of the policy, differentiable.
        rollout: gives old log-probs and mask.
        advantages: (N, T).
        ref_log_probs: (N, T) of the reference.
        config: clip_eps, leash, beta.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7.
    """
    mask = rollout.completion_mask.bool()
    inputs = log_probs, rollout.old_log_probs, advantages, ref_log_probs
    log_probs, old_log_probs, advantages, ref_log_probs = (torch.where(mask, x, 0.0) for x in inputs)
    one_token_a_row = log_probs.reshape(-1, 1), old_log_probs.reshape(-1, 1), advantages.flatten()
    per_token = -clipped_surrogate(*one_token_a_row, config.clip_eps).view_as(log_probs)
    if config.leash == "loss":
        per_token = per_token + config.beta * kl_estimate(log_probs, ref_log_probs, "k3")
    return aggregate(per_token, mask)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, completion_mask: Tensor, eps: float) -> Tensor:
    """Half the squared error of the critic, which gains nothing from moving further than `eps` from its old values.

    loss = mean over tokens of ½ · max((V − return)², (clip(V, V_old − eps, V_old + eps) − return)²)

    It is the maximum: the loss must never look better than it is.

    Args:
        values: (N, T), differentiable.
        old_values: (N, T), before the first step on this rollout.
        returns: (N, T), from `gae`.
        completion_mask: (N, T); nothing outside is read.
        eps: how far a value may move, in the unit of the rewards.

    Source: the value loss of OpenAI's PPO ("baselines", ppo2), which the paper does not mention.

    >>> clipped_value_loss(torch.tensor([[0.5]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.ones(1, 1), 0.2)
    tensor(0.3200)
    """
    mask = completion_mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-eps, eps)
    return aggregate(torch.maximum((values - returns).square(), (clipped - returns).square()) / 2, mask)


def ppo_update(
    ledger: Ledger,
    critic: Critic,
    reference: TinyGPT,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
    rollout: Rollout,
    scores: Tensor,
    config: PPOConfig,
) -> dict[str, float]:
    """Improve policy and critic on one rollout, by as many gradient steps each as the budget has inner epochs.

    Args:
        ledger: holds the policy, and counts its steps.
        critic: its values before the first step make the advantages of all steps.
        reference: the frozen start policy.
        optimizers: of the policy and of the critic.
        rollout: completions of the policy.
        scores: (N,), what each completion earned.
        config: all settings.

    Returns:
        kl: nats per token from the policy that sampled to the reference, by k3; value_loss: mean over the steps.
    """
    texts, mask = (rollout.prompt_ids, rollout.completion_ids), rollout.completion_mask
    with torch.no_grad():
        ref_log_probs = token_log_probs(reference, *texts, rollout.temperature, rollout.prompt_mask)
        old_values = critic.values(*texts, rollout.prompt_mask)
    rewards = token_rewards(rollout, scores, ref_log_probs, config.beta if config.leash == "reward" else 0.0)
    advantages, returns = gae(rewards, old_values, mask, config.gamma, config.gae_lambda)
    advantages = whiten(advantages, mask)
    value_losses = []
    for _ in range(ledger.budget.inner_epochs):
        log_probs = token_log_probs(ledger.policy, *texts, rollout.temperature, rollout.prompt_mask)
        ledger.step(ppo_loss(log_probs, rollout, advantages, ref_log_probs, config), optimizers[0], mask)
        values = critic.values(*texts, rollout.prompt_mask)
        value_losses.append(clipped_value_loss(values, old_values, returns, mask, config.value_clip_eps))
        gradient_step(value_losses[-1], optimizers[1], ledger.budget.max_grad_norm)
    kl = aggregate(kl_estimate(rollout.old_log_probs, ref_log_probs, "k3"), mask).item()
    return {"kl": kl, "value_loss": torch.stack(value_losses).mean().item()}


def train_ppo(
    task,
    policy: TinyGPT,
    budget: Budget = Budget(),
    config: PPOConfig = PPOConfig(),
    reward_model: RewardModel | None = None,
) -> Ledger:
    """Train a policy with PPO, in place, on the verifier's rewards or on a reward model's scores.

    Returns:
        The ledger. Its rows add, of the completions that were sampled in that round: reward, the mean of the verifier's
        rewards; score, the mean of what PPO was given; kl; value_loss. The critic takes as many gradient steps as the policy.
    """
    generator = torch.Generator().manual_seed(budget.seed)
    return ppo_rounds(Ledger(task, policy, budget), generator, config, reward_model)


def train_ppo_with_reward_model(
    task,
    policy: TinyGPT,
    budget: Budget = Budget(),
    config: PPOConfig = PPOConfig(leash="reward"),
    reward_config: RewardModelConfig = RewardModelConfig(),
) -> Ledger:
    """RLHF in small, on one budget: half of the completions train a reward model, the other half is for PPO against it.

    The verifier marks the first half only. Scores are standardized on the pairs that the reward model learned from.

    Returns:
        The ledger of `train_ppo`, with reward_model_steps from the first round on: gradient steps on the reward model.

    Raises:
        ValueError: an odd number of prompts, which cannot be halved, or no pairs.
    """
    if budget.prompts_per_iteration % 2:
        raise ValueError(f"prompts_per_iteration must be even, got {budget.prompts_per_iteration}: half go to the reward model")
    half = replace(budget, prompts_per_iteration=budget.prompts_per_iteration // 2)
    ledger, generator = Ledger(task, policy, half), torch.Generator().manual_seed(budget.seed)
    rounds = range(1, half.iterations + 1)
    pairs = make_pairs([ledger.sampled(sample_iteration(policy, task, half, generator, i)) for i in rounds])
    reward_model = standardize(train_reward_model(policy, pairs, reward_config, budget.seed), pairs)
    ledger.spent["reward_model_steps"] = reward_config.steps(len(pairs))
    return ppo_rounds(ledger, generator, config, reward_model)


def ppo_rounds(ledger: Ledger, generator: torch.Generator, config: PPOConfig, reward_model: RewardModel | None) -> Ledger:
    """Sample, score, update: the rounds of a budget. Whatever was spent before stays in the ledger."""
    task, policy, budget = ledger.task, ledger.policy, ledger.budget
    reference, critic = copy.deepcopy(policy).requires_grad_(False), Critic(policy)
    optimizers = adamw(policy, config.learning_rate), adamw(critic, config.critic_learning_rate)
    for iteration in range(1, budget.iterations + 1):
        rollout = sample_iteration(policy, task, budget, generator, iteration)
        rollout = ledger.sampled(rollout, verified=reward_model is None)
        scores = completion_scores(rollout, reward_model, task.eos_id, config.unfinished_score)
        metrics = ppo_update(ledger, critic, reference, optimizers, rollout, scores, config)
        ledger.measure(reward=rollout.rewards.mean().item(), score=scores.mean().item(), **metrics)
    return ledger


@torch.no_grad()
def completion_scores(rollout: Rollout, reward_model: RewardModel | None, eos_id: int, unfinished_score: float) -> Tensor:
    """(N,): the verifier's rewards, or the reward model's scores, with a fixed one for completions that never end."""
    if reward_model is None:
        return rollout.rewards.flatten()
    scores = reward_model(rollout.prompt_ids, rollout.completion_ids, rollout.completion_mask, rollout.prompt_mask)
    return torch.where((rollout.completion_ids == eos_id).any(dim=1), scores, unfinished_score)
