"""What a leash does, in closed form: the best policy under it, for any set of answers that can be listed.

With few enough answers nothing has to be sampled: rewards, distances and gradients are exact sums. Left out: a leash made of
k3 as a loss, which has the gradient of the other KL, and therefore another optimum.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from grpo_core.policy import TinyGPT
from grpo_core.rollout import Rollout, at_temperature, shared_logits


def leashed_optimum(reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """The policy with the largest mean reward − beta · KL(policy ‖ reference).

    policy(y) = reference(y) · exp(reward(y) / beta) / Z

    Args:
        reference: (answers,) probabilities.
        rewards: (answers,).
        beta: strength of the leash, in units of reward per nat.

    Returns:
        (answers,) probabilities. An answer that the reference never gives is never given.

    Raises:
        ValueError: beta <= 0 (without a leash the best answer takes everything), or shapes that differ.

    Source: Ziebart 2010; Rafailov et al. 2023 (DPO), equation 4.

    >>> leashed_optimum(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), beta=1.0)
    tensor([0.7311, 0.2689])
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}: without a leash the best answer takes everything")
    if reference.shape != rewards.shape:
        raise ValueError(f"reference {tuple(reference.shape)} and rewards {tuple(rewards.shape)} must have the same shape")
    return (reference.log() + rewards / beta).softmax(dim=-1)


def leash_curve(reference: Tensor, rewards: Tensor, truth: Tensor, betas: Sequence[float]) -> pd.DataFrame:
    """The best policy at each beta: what it is paid, what that is worth, how far it went.

    Args:
        reference: (answers,) probabilities.
        rewards: (answers,), what training sees.
        truth: (answers,), what it should see.
        betas: strengths of the leash.

    Returns:
        One row for each beta, with the columns beta, seen, true, kl.
    """
    rows = []
    for beta in betas:
        policy = leashed_optimum(reference, rewards, beta)
        seen, true, distance = (policy * rewards).sum(), (policy * truth).sum(), categorical_kl(policy, reference)
        rows.append({"beta": beta, "seen": seen.item(), "true": true.item(), "kl": distance.item()})
    return pd.DataFrame(rows)


def categorical_kl(policy: Tensor, reference: Tensor) -> Tensor:
    """KL(policy ‖ reference) over the last dimension, in nats; what the policy never does costs nothing.

    >>> categorical_kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor(0.6931)
    """
    return (torch.xlogy(policy, policy) - torch.xlogy(policy, reference)).sum(dim=-1)


def climb(reference: Tensor, rewards: Tensor, beta: float, steps: int = 1500, learning_rate: float = 0.05) -> Tensor:
    """Train a policy of one logit for each answer, from the reference on, by the exact gradient of its objective.

    Args:
        reference: (answers,) probabilities, all above 0.
        rewards: (answers,).
        beta: strength of the leash.
        steps: gradient steps.
        learning_rate: of Adam.

    Returns:
        (steps + 1, answers) probabilities: row 0 is the reference.
    """
    logits = reference.double().log().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=learning_rate)
    path = [logits.detach().softmax(dim=-1)]
    for _ in range(steps):
        policy = logits.softmax(dim=-1)
        loss = beta * categorical_kl(policy, reference.double()) - (policy * rewards).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        path.append(logits.detach().softmax(dim=-1))
    return torch.stack(path)


@torch.no_grad()
def completion_kl(policy: TinyGPT, reference: TinyGPT, rollout: Rollout) -> Tensor:
    """(N,) KL(policy ‖ reference) of the next token, exact, added up along each completion.

    Its mean over completions that the policy sampled estimates, without bias, the KL of whole completions. It is quieter than
    any estimate from the sampled tokens' log-probs alone, and never negative.
    """

    def log_probs(model: TinyGPT) -> Tensor:
        logits = shared_logits(model, rollout.prompt_ids, rollout.completion_ids, rollout.prompt_mask)
        return at_temperature(logits, rollout.temperature).log_softmax(dim=-1)

    mine, theirs = log_probs(policy), log_probs(reference)
    per_token = (mine.exp() * (mine - theirs)).sum(dim=-1)
    return torch.where(rollout.completion_mask, per_token, 0.0).sum(dim=1)
