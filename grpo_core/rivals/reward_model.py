"""A reward model: a network that learns from pairs which of two completions is better, and then stands in for the verifier.

It is the start policy with another head: one number, read at the last real token of a text. Such models are needed where no
verifier exists; here we have both, and can see how far the model's opinion is from the truth. Left out: ties, margins,
ensembles.
"""

import copy
import math
from dataclasses import dataclass

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_core.config import check_fields
from grpo_core.evaluate import Estimate, proportion
from grpo_core.policy import TinyGPT
from grpo_core.rivals.budget import adamw, gradient_step
from grpo_core.rivals.pairs import Pairs
from grpo_core.rollout import positions


def scalar_network(policy: TinyGPT) -> TinyGPT:
    """A copy of the policy whose head gives one number for each token, at first 0.

    The body keeps what the policy has learned about the texts. A network that starts from scratch has too few examples.
    """
    network = copy.deepcopy(policy).requires_grad_(True)
    network.head = nn.Linear(policy.head.in_features, 1).to(policy.head.weight)
    nn.init.zeros_(network.head.weight)
    nn.init.zeros_(network.head.bias)
    return network


def last_positions(mask: Tensor) -> Tensor:
    """(N,) index of the last real token of each row, wherever the padding is.

    It comes from the mask. Ids cannot tell: the EOS and the padding may share one.

    >>> last_positions(torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]))
    tensor([3, 1])
    """
    if not mask.bool().any(dim=1).all():
        raise ValueError("a row of the mask has no real token: there is nothing to read")
    index = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask.bool(), index, -1).amax(dim=1)


class RewardModel(nn.Module):
    """Scores a prompt and its completion with one number.

    Args:
        policy: its body is copied; the policy itself is left alone.
    """

    def __init__(self, policy: TinyGPT):
        super().__init__()
        self.network = scalar_network(policy)

    def forward(
        self,
        prompt_ids: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        prompt_mask: Tensor | None = None,
    ) -> Tensor:
        """(N,) scores, read at the last real token: the EOS, or the last token of a completion without one.

        A row's score does not depend on the other rows, nor on padding on either side.

        Args:
            prompt_ids: (N, P).
            completion_ids: (N, T).
            completion_mask: (N, T), true through the first EOS.
            prompt_mask: (N, P), false at left padding.
        """
        before = torch.ones_like(prompt_ids, dtype=torch.bool) if prompt_mask is None else prompt_mask.bool()
        mask = torch.cat([before, completion_mask.bool()], dim=1)
        token_ids = torch.cat([prompt_ids, completion_ids], dim=1)
        numbers = self.network(token_ids, attention_mask=mask, position_ids=positions(mask)).squeeze(-1)
        return numbers.gather(1, last_positions(mask).unsqueeze(1)).squeeze(1)

    def margins(self, pairs: Pairs) -> Tensor:
        """(K,) score of the chosen completion less that of the rejected one."""
        chosen = self(pairs.prompt_ids, pairs.chosen_ids, pairs.chosen_mask, pairs.prompt_mask)
        return chosen - self(pairs.prompt_ids, pairs.rejected_ids, pairs.rejected_mask, pairs.prompt_mask)


@dataclass(frozen=True)
class RewardModelConfig:
    """The settings of the reward model's training."""

    # Step size of AdamW.
    learning_rate: float = 1e-3
    # Passes over all pairs.
    epochs: int = 8
    # Pairs in a gradient step.
    batch_size: int = 32

    def __post_init__(self):
        check_fields(self)
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(f"epochs and batch_size must be at least 1, got {self.epochs} and {self.batch_size}")

    def steps(self, pairs: int) -> int:
        """Gradient steps that the training on so many pairs takes."""
        return self.epochs * math.ceil(pairs / self.batch_size)


def pair_loss(margins: Tensor) -> Tensor:
    """Mean of − log sigmoid(score of the chosen − score of the rejected): the Bradley-Terry model's log-likelihood.

    ln 2 as long as the model has no opinion. The slope with respect to a margin m is −sigmoid(−m), divided by their number.

    Args:
        margins: (K,), as `RewardModel.margins` gives them.

    Source: Bradley and Terry 1952; Christiano et al. 2017; Ouyang et al. 2022 (InstructGPT), equation 1.

    >>> pair_loss(torch.tensor([0.0, 0.0]))
    tensor(0.6931)
    """
    return -F.logsigmoid(margins).mean()


def train_reward_model(
    policy: TinyGPT,
    pairs: Pairs,
    config: RewardModelConfig = RewardModelConfig(),
    seed: int = 0,
    max_grad_norm: float = 1.0,
) -> RewardModel:
    """A reward model that starts from the policy's body and learns from the pairs, in shuffled batches.

    Args:
        policy: read only.
        pairs: keep some aside for `pair_accuracy`, of other prompts than these.
        config: all settings.
        seed: of the order of the pairs.
        max_grad_norm: a larger gradient is scaled down to this norm.
    """
    model = RewardModel(policy)
    optimizer, generator = adamw(model, config.learning_rate), torch.Generator().manual_seed(seed)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(pairs), generator=generator).split(config.batch_size):
            gradient_step(pair_loss(model.margins(pairs[rows])), optimizer, max_grad_norm)
    optimizer.zero_grad()  # The gradients would be held as long as the model.
    return model.requires_grad_(False)


@torch.no_grad()
def standardize(model: RewardModel, pairs: Pairs) -> RewardModel:
    """Shift and scale the model's scores to mean 0 and standard deviation 1 on the completions of these pairs, in place.

    Pairs say nothing about the scores' zero, and little about their scale; PPO's clipping, leash and critic need both.
    The order of completions stays. Measure `calibration` before: afterwards the margins are in another unit.

    Raises:
        ValueError: all scores are equal.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.1.
    """
    sides = (pairs.chosen_ids, pairs.chosen_mask), (pairs.rejected_ids, pairs.rejected_mask)
    scores = torch.cat([model(pairs.prompt_ids, *side, pairs.prompt_mask) for side in sides])
    if scores.max() == scores.min():
        raise ValueError("the reward model gives all completions the same score: train it first")
    head, spread = model.network.head, scores.std(correction=0)
    head.bias.sub_(scores.mean())
    head.bias.div_(spread)
    head.weight.div_(spread)
    return model


@torch.no_grad()
def pair_accuracy(model: RewardModel, pairs: Pairs) -> Estimate:
    """Share of pairs whose right completion gets the higher score; a tie counts as wrong.

    The 95 % interval takes the pairs as independent. Pairs of one prompt are not quite, so the true one is wider.
    """
    return proportion(int((model.margins(pairs) > 0).sum()), len(pairs))


@torch.no_grad()
def calibration(model: RewardModel, pairs: Pairs, bins: int = 5) -> pd.DataFrame:
    """Is the model right as often as it says? One row for each bin of confidence that holds a pair.

    Its confidence in the completion that it prefers is sigmoid(|margin|), between 0.5 and 1.

    Returns:
        Columns: predicted, the mean confidence; observed, the share of pairs whose preferred completion is the right one,
        with observed_low and observed_high, its 95 % interval; pairs.

    Raises:
        ValueError: fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    margins = model.margins(pairs)
    confidence = margins.abs().sigmoid()
    bin_of = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    rows = []
    for number in bin_of.unique():
        inside = bin_of == number
        right, count = int((margins[inside] > 0).sum()), int(inside.sum())
        predicted = {"predicted": confidence[inside].mean().item()}
        rows.append(predicted | proportion(right, count).columns("observed") | {"pairs": count})
    return pd.DataFrame(rows)
