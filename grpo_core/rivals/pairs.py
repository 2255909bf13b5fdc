"""Pairs of completions, one right and one wrong, for the same prompt: what DPO and a reward model learn from.

They are sampled once, from the start policy, and marked by the verifier. Within a group each right completion is paired with
one wrong one; a group that is all right or all wrong gives none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_core.rollout import Rollout


@dataclass(frozen=True)
class Pairs:
    """K pairs. Prompt length P, completion length T.

    Attributes:
        prompt_ids: (K, P).
        chosen_ids, rejected_ids: (K, T), the right and the wrong completion.
        chosen_mask, rejected_mask: (K, T) bool, true through the first EOS.
        prompt_mask: (K, P) bool, false at left padding; None where there is none.
    """

    prompt_ids: Tensor
    chosen_ids: Tensor
    rejected_ids: Tensor
    chosen_mask: Tensor
    rejected_mask: Tensor
    prompt_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.chosen_ids)

    def __getitem__(self, rows) -> "Pairs":
        """Some of the pairs: a slice or a tensor of indices."""
        return Pairs(*(None if x is None else x[rows] for x in vars(self).values()))


def make_pairs(rollouts: Sequence[Rollout]) -> Pairs:
    """Pair the k-th right completion of each group with its k-th wrong one.

    Raises:
        ValueError: not one group has a right and a wrong completion.
    """
    longest = max(rollout.prompt_ids.shape[1] for rollout in rollouts)
    parts = [pairs_of(rollout, longest) for rollout in rollouts]
    if not sum(map(len, parts)):
        raise ValueError("no group has both a right and a wrong completion: sample more, or from a better policy")
    pairs = Pairs(*(torch.cat(column) for column in zip(*(vars(part).values() for part in parts))))
    return replace(pairs, prompt_mask=None) if pairs.prompt_mask.all() else pairs


def pairs_of(rollout: Rollout, prompt_length: int) -> Pairs:
    """The pairs of one rollout, its prompts padded on the left to this length: rollouts need not be padded alike."""
    rows = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view_as(rollout.rewards)
    chosen, rejected = [], []
    for group, rewards in zip(rows, rollout.rewards):
        right, wrong = group[rewards == rewards.max()], group[rewards < rewards.max()]
        count = min(len(right), len(wrong))
        chosen.append(right[:count])
        rejected.append(wrong[:count])
    good, bad = torch.cat(chosen), torch.cat(rejected)
    ids, mask, prompt_ids = rollout.completion_ids, rollout.completion_mask, rollout.prompt_ids
    real = torch.ones_like(prompt_ids, dtype=torch.bool) if rollout.prompt_mask is None else rollout.prompt_mask
    prompt_ids, real = (F.pad(x[good], (prompt_length - prompt_ids.shape[1], 0)) for x in (prompt_ids, real))
    return Pairs(prompt_ids, ids[good], ids[bad], mask[good], mask[bad], real)
