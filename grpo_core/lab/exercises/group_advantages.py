"""Exercises of notebook 02: advantages, the baseline of the others, dead groups, the size of the push."""

import torch

from grpo_core.advantages import flat_group_probability, group_advantages, leave_one_out_advantages
from grpo_core.lab.checks import Exercise, Mistake

GROUPS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.5, -1.0, 0.5, 0.0]])


def _std(rewards, dim, correction=0, keepdim=True):
    return rewards.std(dim=dim, correction=correction, keepdim=keepdim)


check_group_advantages = Exercise(
    right=group_advantages,
    inputs=[(GROUPS,), (GROUPS[:2],), (torch.tensor([[0.0, 1.0]]),), (torch.tensor([[0.01, 0.0, 0.0, 0.0]]),)],
    mistakes=[
        Mistake(
            lambda r: group_advantages(r, correction=1),
            "you divided by G − 1 inside the standard deviation (torch's default). Here it is the population's: correction=0.",
        ),
        Mistake(
            lambda r: group_advantages(r, scale="none"),
            "you subtracted the group's mean, but did not divide by the standard deviation.",
        ),
        Mistake(
            lambda r: (r - r.mean()) / (r.std(correction=0) + 1e-4),
            "you took one mean and one std over the whole batch. Each row is a group of its own: dim=1, keepdim=True.",
        ),
        Mistake(
            lambda r: (r - r.mean(0, keepdim=True)) / (_std(r, 0) + 1e-4),
            "you averaged down the columns (dim=0). A group is a row: dim=1.",
        ),
        Mistake(
            lambda r: (r - r.mean(1, keepdim=True)) / _std(r, 1),
            "a group whose rewards are all equal gives 0 / 0 = nan. Add 1e-4 to the standard deviation.",
        ),
        Mistake(
            lambda r: -group_advantages(r),
            "the sign is turned around: the better completion must get the larger advantage.",
        ),
        Mistake(
            lambda r: (r - r.mean(1, keepdim=True)) / (r.var(1, keepdim=True, correction=0) + 1e-4),
            "you divided by the variance. Its square root is the standard deviation.",
        ),
        Mistake(
            lambda r: (r - r.mean(1, keepdim=True)) / (r.var(1, keepdim=True, correction=0) + 1e-4).sqrt(),
            "you added 1e-4 to the variance, under the root. It is added to the standard deviation.",
        ),
        Mistake(
            lambda r: r / (_std(r, 1) + 1e-4),
            "you divided by the standard deviation, but did not subtract the mean.",
        ),
    ],
)

check_leave_one_out = Exercise(
    right=leave_one_out_advantages,
    inputs=[(GROUPS,), (torch.tensor([[0.0, 1.0]]),)],
    mistakes=[
        Mistake(
            lambda r: r - r.mean(1, keepdim=True),
            "this is the mean of the whole group. A completion must not count in its own baseline: leave it out.",
        ),
        Mistake(
            lambda r: r - r.sum(1, keepdim=True) / (r.shape[1] - 1),
            "you divided the sum by G − 1, but the completion's own reward is still in that sum.",
        ),
        Mistake(
            lambda r: r - (r.sum(1, keepdim=True) - r) / r.shape[1],
            "you left the completion out of the sum, but still divided by G. There are only G − 1 others.",
        ),
        Mistake(
            lambda r: (r.sum(1, keepdim=True) - r) / (r.shape[1] - 1),
            "this is the baseline itself. The advantage is the reward minus the baseline.",
        ),
    ],
)

check_dead_groups = Exercise(
    right=flat_group_probability,
    inputs=[(0.1, 8), (0.5, 2), (0.9, 4), (0.0, 8), (1.0, 16)],
    mistakes=[
        Mistake(lambda p, g: (1 - p) ** g, "you counted the groups that are all wrong. All right is dead too: add p^G."),
        Mistake(lambda p, g: p**g, "you counted the groups that are all right. All wrong is dead too: add (1 − p)^G."),
        Mistake(
            lambda p, g: 1 - p**g - (1 - p) ** g,
            "this is the share of groups that still teach something. The dead ones are the rest.",
        ),
        Mistake(lambda p, g: p**g * (1 - p) ** g, "all right and all wrong exclude each other: add the two, don't multiply."),
        Mistake(lambda p, g: p ** (g - 1) + (1 - p) ** (g - 1), "the exponent is G: each of the G completions has to agree."),
    ],
)
