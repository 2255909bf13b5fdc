"""DPO: learn from pairs (right, wrong) as a classifier does, without reward model, critic and sampling on the way.

The pairs are sampled once, from the start policy, which stays the reference: its log-probs are computed once, so no second
network is held. Left out: label smoothing, the other losses of the family, fresh pairs from the trained policy.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_core.config import check_fields
from grpo_core.grpo import sample_iteration
from grpo_core.rivals.budget import Budget, Ledger, adamw, shuffled_batches
from grpo_core.rivals.pairs import Pairs, make_pairs
from grpo_core.rollout import token_log_probs


@dataclass(frozen=True)
class DPOConfig:
    """The settings of DPO."""

    # Step size of AdamW.
    learning_rate: float = 2e-4
    # How dear it is to leave the reference. Much smaller values ruin the start policy: see `train_dpo`.
    beta: float = 3.0

    def __post_init__(self):
        check_fields(self)
        check_beta(self.beta)


def check_beta(beta: float) -> None:
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta must be a positive number, got {beta}: at 0 the loss is ln 2 whatever the policy does")


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """How badly the policy tells right from wrong, when its likeness to the reference is read as a reward.

    loss = mean of − log sigmoid( beta · [(chosen − ref_chosen) − (rejected − ref_rejected)] )

    Args:
        chosen, rejected: (K,) log-probs of whole completions under the policy: sums over tokens, not means.
        ref_chosen, ref_rejected: (K,) the same under the reference.
        beta: scale of the implied reward, beta · (log_prob − ref_log_prob).

    Returns:
        A scalar; ln 2 if policy and reference are the same.

    Raises:
        ValueError: `beta` is not positive, or the log-probs are not four equally long vectors.

    Source: Rafailov et al. 2023, equation 7.

    >>> dpo_loss(*torch.tensor([[-10.0], [-12.0], [-10.5], [-11.0]]), beta=0.1)
    tensor(0.6210)
    """
    check_beta(beta)
    shapes = [tuple(x.shape) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    if chosen.ndim != 1 or len(set(shapes)) > 1 or not len(chosen):
        raise ValueError(f"give one log-prob for each completion, (K,) in all four; got the shapes {shapes}")
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


def completion_log_probs(
    policy,
    prompt_ids: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    prompt_mask: Tensor | None = None,
) -> Tensor:
    """(N,) log-probs of whole completions at temperature 1: the sum of those of their tokens, EOS included."""
    log_probs = token_log_probs(policy, prompt_ids, completion_ids, 1.0, prompt_mask)
    return torch.where(completion_mask.bool(), log_probs, 0.0).sum(dim=1)


def pair_log_probs(policy, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """(K,) log-probs of the chosen completions and (K,) of the rejected ones, from one pass over both."""
    prompt_mask = None if pairs.prompt_mask is None else pairs.prompt_mask.repeat(2, 1)
    ids = torch.cat([pairs.chosen_ids, pairs.rejected_ids])
    mask = torch.cat([pairs.chosen_mask, pairs.rejected_mask])
    chosen, rejected = completion_log_probs(policy, pairs.prompt_ids.repeat(2, 1), ids, mask, prompt_mask).chunk(2)
    return chosen, rejected


def train_dpo(task, policy, budget: Budget = Budget(), config: DPOConfig = DPOConfig()) -> Ledger:
    """Train a policy with DPO, in place. A step sees as many completions as a step of GRPO, half of them right.

    The loss pays for a margin of about 1 / beta nats and does not ask which way: with a small beta the right completions
    sink too, only less than the wrong ones, and what gains is what stands in no pair. `chosen` below 0 shows it.

    The ledger adds, for the last batch: loss, margin (the mean of what `dpo_loss` scales by beta), chosen and rejected (how
    far their log-probs have moved from the reference, in nats, on average).

    Raises:
        ValueError: no group of the start policy has both a right and a wrong completion.
    """
    ledger, optimizer = Ledger(task, policy, budget), adamw(policy, config.learning_rate)
    generator = torch.Generator().manual_seed(budget.seed)
    rounds = range(1, budget.iterations + 1)
    pairs = make_pairs([ledger.sampled(sample_iteration(policy, task, budget, generator, i)) for i in rounds])
    with torch.no_grad():
        ref_chosen, ref_rejected = pair_log_probs(policy, pairs)  # The policy is still the reference.
    size = budget.completions // budget.iterations // 2
    for step, rows in enumerate(shuffled_batches(len(pairs), size, budget.gradient_steps, generator), 1):
        batch = pairs[rows]
        chosen, rejected = pair_log_probs(policy, batch)
        loss = dpo_loss(chosen, rejected, ref_chosen[rows], ref_rejected[rows], config.beta)
        ledger.step(loss, optimizer, torch.cat([batch.chosen_mask, batch.rejected_mask]))
        if step % budget.inner_epochs == 0:
            moved = [(new - ref[rows]).mean().item() for new, ref in ((chosen, ref_chosen), (rejected, ref_rejected))]
            ledger.measure(loss=loss.item(), margin=moved[0] - moved[1], chosen=moved[0], rejected=moved[1])
    return ledger
