"""What one update of each method does to one group, token by token: how hard its loss pushes, and what a step then moves.

Each method's own loss is differentiated by the log-probs of the group's tokens; that slope is the push. Then one real step of
AdamW is taken on the same loss. The group is the whole batch here, so a batch's mean is the group's mean.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd
import torch
from torch import Tensor

from grpo_core.grpo import grpo_loss, sample_iteration
from grpo_core.lab.group_stepper import RECORDED_GROUP, Group
from grpo_core.rivals.budget import Budget, adamw, gradient_step
from grpo_core.rivals.dpo import dpo_loss
from grpo_core.rivals.gae import gae, whiten
from grpo_core.rivals.imitation import imitation_loss
from grpo_core.rivals.pairs import make_pairs
from grpo_core.rivals.ppo import Critic, PPOConfig, clipped_value_loss, completion_scores, ppo_loss, token_rewards
from grpo_core.rivals.reinforce import baseline_advantages, reinforce_loss
from grpo_core.rivals.reward_model import RewardModel, standardize, train_reward_model
from grpo_core.rollout import Rollout, through_eos, token_log_probs
from grpo_core.studies.scoreboard import METHODS
from grpo_core.task import Addition, Problem
from grpo_core.warm_start import warm_start

OWN_GROUP = Group(  # What the start policy samples first in a run with seed 0: see outputs/group_example.txt.
    "24+48=", "72", ("72;", "72;", "62;", "62;", "62;", "71;", "61;", "62;"), (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
)
LEARNING_RATE = 2e-4  # The same for all: AdamW's first step moves each weight that has a gradient by about this.
SAMPLED_AT = 0.7
BATCHES = 6  # Of the start policy's completions, from which critic and reward model have learned before the step.
NEVER = 1e9  # A value may move as far as it likes.


@dataclass(frozen=True)
class Update:
    """The loss of a method, as a function of the log-probs of the group and, in a last row, of the true answer.

    Attributes:
        loss: (G + 1, T) log-probs → scalar.
        terms: what the loss is the mean over: so many tokens, or pairs. A push is given in units of one term.
        temperature: at which the method scores.
    """

    loss: Callable[[Tensor], Tensor]
    terms: int
    temperature: float = SAMPLED_AT


@cache
def token_effects(method: str, group: Group = RECORDED_GROUP) -> pd.DataFrame:
    """The push on each token of a group, and what one step moves: one row for each token.

    Args:
        method: one of UPDATES; the names are those of the scoreboard.
        group: completions with their rewards.

    Returns:
        Columns: completion, its number in the group (the number behind the last is the true answer); text; reward; t and
        token; push, minus the slope of the loss with respect to this token's log-prob, times the loss's number of terms;
        net, the sum of the pushes on this token behind the same beginning; before and change, its log-prob at temperature
        0.7 and what the step adds.
    """
    policy = warm_start()
    rollout = score_group(policy, group)
    update = UPDATES[method](rollout)
    task, answer = Addition(), rollout.problems[0].answer
    truth = torch.tensor([task.encode(f"{answer};".ljust(rollout.completion_ids.shape[1], ";"))])
    tokens = torch.cat([rollout.prompt_ids, rollout.prompt_ids[:1]]), torch.cat([rollout.completion_ids, truth])
    push, before, after = one_step(policy, tokens, update)
    texts, rewards = [*group.texts, f"{answer};"], [*group.rewards, 1.0]
    rows = [
        (i, text, rewards[i], t, token, push[i, t].item(), before[i, t].item(), (after - before)[i, t].item())
        for i, text in enumerate(texts)
        for t, token in enumerate(text)
    ]
    frame = pd.DataFrame(rows, columns=["completion", "text", "reward", "t", "token", "push", "before", "change"])
    beginnings = [text[: t + 1] for text, t in zip(frame["text"], frame["t"])]
    return frame.assign(net=frame.groupby(beginnings)["push"].transform("sum"))


def one_step(policy, tokens: tuple[Tensor, Tensor], update: Update) -> tuple[Tensor, Tensor, Tensor]:
    """Push on each token, and its log-prob before and after one step of AdamW: three times (G + 1, T)."""
    stepped = copy.deepcopy(policy)
    log_probs = token_log_probs(stepped, *tokens, update.temperature)
    loss = update.loss(log_probs)
    (slope,) = torch.autograd.grad(loss, log_probs, retain_graph=True)
    gradient_step(loss, adamw(stepped, LEARNING_RATE), max_grad_norm=1.0)
    with torch.no_grad():
        before, after = (token_log_probs(model, *tokens, SAMPLED_AT) for model in (policy, stepped))
    return -slope * update.terms + 0.0, before, after  # A real 0 where minus 0 would be.


def score_group(policy, group: Group) -> Rollout:
    """The rollout of a group that was written down as text."""
    task, longest = Addition(), max(map(len, group.texts))
    completion_ids = torch.tensor([task.encode(text.ljust(longest, ";")) for text in group.texts])
    prompt_ids = torch.tensor([task.encode(group.prompt)] * len(group.texts))
    with torch.no_grad():
        old_log_probs = token_log_probs(policy, prompt_ids, completion_ids, SAMPLED_AT)
    return Rollout(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_mask=through_eos(completion_ids, task.eos_id),
        old_log_probs=old_log_probs,
        rewards=torch.tensor([group.rewards]),
        temperature=SAMPLED_AT,
        texts=group.texts,
        problems=[Problem(group.prompt, group.answer)],
    )


def grpo(rollout: Rollout) -> Update:
    """The leash has no pull yet: policy and reference are still the same."""

    def loss(log_probs):
        return grpo_loss(log_probs[:-1], rollout, rollout.old_log_probs, METHODS["GRPO"].config)[0]

    return Update(loss, int(rollout.completion_mask.sum()))


def reinforce(baseline: str) -> Callable[[Rollout], Update]:
    def of(rollout: Rollout) -> Update:
        advantages, mask = baseline_advantages(rollout.rewards, baseline).flatten(), rollout.completion_mask
        return Update(lambda log_probs: reinforce_loss(log_probs[:-1], advantages, mask), int(mask.sum()))

    return of


def ppo(config: PPOConfig, learned_reward: bool) -> Callable[[Rollout], Update]:
    def of(rollout: Rollout) -> Update:
        mask, ref_log_probs = rollout.completion_mask, rollout.old_log_probs
        critic, reward_model = judges(learned_reward)
        scores = completion_scores(rollout, reward_model, Addition.eos_id, config.unfinished_score)
        rewards = token_rewards(rollout, scores, ref_log_probs, config.beta)
        values = critic.values(rollout.prompt_ids, rollout.completion_ids)
        advantages = whiten(gae(rewards, values, mask, config.gamma, config.gae_lambda)[0], mask)
        return Update(lambda log_probs: ppo_loss(log_probs[:-1], rollout, advantages, ref_log_probs, config), int(mask.sum()))

    return of


def dpo(rollout: Rollout) -> Update:
    """Of the group only as many completions are in pairs as the rarer verdict allows."""
    numbered = replace(rollout, completion_ids=torch.arange(len(rollout.completion_ids)).unsqueeze(1))
    pairs = make_pairs([numbered])  # With numbers in place of tokens, the pairs say which completions they hold.
    chosen, rejected = pairs.chosen_ids.squeeze(1), pairs.rejected_ids.squeeze(1)

    def loss(log_probs):
        sums = torch.where(rollout.completion_mask, log_probs[:-1], 0.0).sum(dim=1)
        now = sums[chosen], sums[rejected]
        reference = (x.detach() for x in now)  # At the start it is the policy.
        return dpo_loss(*now, *reference, METHODS["DPO"].config.beta)

    return Update(loss, len(pairs), temperature=1.0)


def expert_iteration(rollout: Rollout) -> Update:
    """Each right text counts once, however often it was sampled: here its first copy."""
    rewards = rollout.rewards.flatten().tolist()
    right = [i for i, text in enumerate(rollout.texts) if rewards[i] == 1 and text not in rollout.texts[:i]]
    mask = rollout.completion_mask[right]
    return Update(lambda log_probs: imitation_loss(log_probs[:-1][right], mask), int(mask.sum()), temperature=1.0)


def supervised(rollout: Rollout) -> Update:
    """The true answer, whatever was sampled."""
    length = len(rollout.problems[0].answer) + 1
    mask = torch.ones(1, length)
    return Update(lambda log_probs: imitation_loss(log_probs[-1:, :length], mask), length, temperature=1.0)


UPDATES: dict[str, Callable[[Rollout], Update]] = {
    "GRPO": grpo,
    "RLOO": reinforce("leave_one_out"),
    "REINFORCE, batch mean": reinforce("batch"),
    "REINFORCE, no baseline": reinforce("none"),
    "PPO, verifier": ppo(METHODS["PPO, verifier"].config, learned_reward=False),
    "PPO, reward model": ppo(METHODS["PPO, reward model"].config, learned_reward=True),
    "DPO": dpo,
    "expert iteration": expert_iteration,
    "supervised": supervised,
}


@cache
def judges(learned_reward: bool) -> tuple[Critic, RewardModel | None]:
    """A critic, and a reward model if there is to be one, that have seen six batches of the start policy's completions.

    A critic at the very start would say 0 everywhere, and show nothing of what a critic does.
    """
    policy, generator = warm_start(), torch.Generator().manual_seed(0)
    rollouts = [sample_iteration(policy, Addition(), Budget(), generator, i) for i in range(1, BATCHES + 1)]
    reward_model = None
    if learned_reward:
        pairs = make_pairs(rollouts)
        reward_model = standardize(train_reward_model(policy, pairs), pairs)
    critic = Critic(policy)
    optimizer = adamw(critic, PPOConfig().critic_learning_rate)
    for rollout in [rollout for rollout in rollouts for _ in range(Budget().inner_epochs)]:
        scores = completion_scores(rollout, reward_model, Addition.eos_id, PPOConfig().unfinished_score)
        values = critic.values(rollout.prompt_ids, rollout.completion_ids)
        returns = scores.unsqueeze(1).expand_as(values)  # Nothing is paid on the way.
        loss = clipped_value_loss(values, values.detach(), returns, rollout.completion_mask, NEVER)
        gradient_step(loss, optimizer, max_grad_norm=1.0)
    return critic.requires_grad_(False), reward_model
