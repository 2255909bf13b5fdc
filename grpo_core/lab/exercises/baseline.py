"""Exercises of notebook 01: the verifier, the mask through EOS, the loss of REINFORCE with a baseline, pass@k."""

import math

import torch

from grpo_core.advantages import group_advantages, leave_one_out_advantages
from grpo_core.lab.checks import Exercise, Mistake, Probed, no_gradient, value_and_gradient
from grpo_core.rollout import through_eos

check_verifier = Exercise(
    right=lambda completion, answer: float(completion == f"{answer};"),
    inputs=[
        *[("72;", "72"), ("73;", "72"), ("72", "72"), ("172;", "72"), ("720;", "72"), ("72;;", "72"), ("7;2;", "72")],
        *[("", "72"), (";", "72"), ("072;", "72"), ("72;7", "72"), ("7272", "72"), ("150;", "150"), ("72 ;", "72")],
    ],
    mistakes=[
        Mistake(
            lambda completion, answer: float(completion == answer),
            "the answer comes without the EOS, the completion must have it. You reward exactly those that never ended.",
        ),
        Mistake(
            lambda completion, answer: float(answer in completion),
            "you accept the answer anywhere in the completion: 172; and 7272 would be paid. A policy finds such a gap.",
        ),
        Mistake(
            lambda completion, answer: float(f"{answer};" in completion),
            "you accept the answer anywhere in the completion: 172; would be paid. Compare the whole text.",
        ),
        Mistake(
            lambda completion, answer: float(completion.startswith(answer)),
            "you only look at the beginning: 720; and an answer that never ends would be paid.",
        ),
        Mistake(
            lambda completion, answer: float(completion.startswith(f"{answer};")),
            "you only look at the beginning: what stands behind the answer must be nothing at all.",
        ),
        Mistake(
            lambda completion, answer: float(completion.endswith(f"{answer};")),
            "you only look at the end: 172; would be paid for 72.",
        ),
        Mistake(
            lambda completion, answer: float(completion.rstrip(";") == answer),
            "you took the ; off before you compared. Then a completion that never ended is paid, too.",
        ),
        Mistake(
            lambda completion, answer: float(completion.replace(";", "") == answer),
            "you took every ; off before you compared. Then a completion that never ended is paid, too.",
        ),
        Mistake(
            lambda completion, answer: float(completion.split(";")[0] == answer),
            "you compare what stands before the first ;. Then a completion that never ended is paid, too.",
        ),
        Mistake(
            lambda completion, answer: float(completion != f"{answer};"),
            "the verdict is turned around: 1 is for right.",
        ),
    ],
)

EOS = 2
IDS = torch.tensor([[5, 6, 2, 0, 0], [5, 6, 7, 8, 9], [2, 0, 0, 0, 0], [5, 2, 6, 2, 0], [7, 9, 2, 2, 2]])


def _before_eos(ids, eos_id):
    return (ids == eos_id).long().cumsum(dim=1) == 0


def _through_last_eos(ids, eos_id):
    is_eos = (ids == eos_id).long()
    return torch.where(is_eos.any(dim=1, keepdim=True), is_eos.flip(1).cumsum(dim=1).flip(1) > 0, True)


def _by_argmax(ids, eos_id):
    """argmax of a row without any EOS is 0, as if the first token were one."""
    end = (ids == eos_id).long().argmax(dim=1, keepdim=True)
    return torch.arange(ids.shape[1]) <= end


check_eos_mask = Exercise(
    right=through_eos,
    inputs=[(IDS, EOS), (IDS[1:2], EOS), (torch.tensor([[0, 1, 4], [4, 4, 4], [1, 0, 4]]), 4)],
    mistakes=[
        Mistake(
            _before_eos,
            "the EOS itself is missing. It is trained as every other token, or the policy never learns to stop.",
        ),
        Mistake(
            lambda ids, eos_id: ids != eos_id,
            "you dropped every EOS and kept what stands behind it. Behind the first EOS is only filling; the EOS counts.",
        ),
        Mistake(
            lambda ids, eos_id: (ids == eos_id).long().cumsum(dim=1) <= 1,
            "you kept the filling between the first EOS and a second one. The mask ends with the first EOS.",
        ),
        Mistake(
            _through_last_eos,
            "you went on to the last EOS. The completion ends with the first.",
        ),
        Mistake(
            _by_argmax,
            "a completion without an EOS has all its tokens in the mask. argmax gives 0 where there is no EOS at all.",
        ),
        Mistake(
            lambda ids, eos_id: through_eos(ids, eos_id) & (ids == eos_id).any(dim=1, keepdim=True),
            "a completion without an EOS has all its tokens in the mask: they were sampled, and they are to blame.",
        ),
        Mistake(
            lambda ids, eos_id: torch.ones_like(ids, dtype=torch.bool),
            "you kept everything. What stands behind the first EOS is filling that nobody sampled.",
        ),
        Mistake(
            lambda ids, eos_id: ~through_eos(ids, eos_id),
            "the mask is turned around: true is for the tokens that count.",
        ),
    ],
)


def reinforce_loss(log_probs, mask, rewards):
    """−mean over completions of (reward − group mean) · log-probability of the completion."""
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    return -(advantages.flatten() * torch.where(mask, log_probs, 0.0).sum(dim=1)).mean()


def _weighed(advantages, log_probs, mask):
    return -(advantages.flatten() * (log_probs * mask).sum(dim=1)).mean()


def _loss_input(prompts, group_size, length, seed):
    """Group by group: completions of different lengths, and groups of which some are better than others."""
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * group_size
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    rewards = (torch.rand(prompts, group_size, generator=generator) < 0.5).float() + torch.arange(prompts).unsqueeze(1)
    return -torch.rand(rows, length, generator=generator) * 3, torch.arange(length) < lengths, rewards


check_reinforce_loss = Probed(
    probe=value_and_gradient,
    otherwise="the loss or its gradient is off. Work out two completions of two tokens by hand.",
    right=reinforce_loss,
    inputs=[_loss_input(2, 4, 3, seed=0), _loss_input(3, 3, 4, seed=1), _loss_input(1, 8, 4, seed=2)],
    mistakes=[
        Mistake(
            lambda lp, mask, r: -reinforce_loss(lp, mask, r),
            "the sign is turned around. An optimizer walks downhill, so the loss is minus what should grow.",
        ),
        Mistake(
            lambda lp, mask, r: _weighed(r, lp, mask),
            "the baseline is missing: these are the raw rewards.",
        ),
        Mistake(
            lambda lp, mask, r: _weighed(r - r.mean(), lp, mask),
            "you subtracted the mean of the whole batch. Each row of rewards is a group with a mean of its own: dim=1.",
        ),
        Mistake(
            lambda lp, mask, r: _weighed(r - r.mean(dim=1, keepdim=True), lp, torch.ones_like(mask)),
            "you also counted what stands behind the EOS. Only tokens inside the mask belong to the completion.",
        ),
        Mistake(
            lambda lp, mask, r: reinforce_loss(lp, mask, r) * len(lp),
            "you summed over completions. The loss is their mean, or it would grow with the batch.",
        ),
        Mistake(
            lambda lp, mask, r: reinforce_loss(lp / mask.sum(dim=1, keepdim=True), mask, r),
            "you averaged over a completion's tokens. The log-probability of a completion is the sum of theirs.",
        ),
        Mistake(
            lambda lp, mask, r: reinforce_loss(lp, mask, r) * len(lp) / mask.sum(),
            "you divided by the number of tokens. REINFORCE takes the mean over completions. (GRPO does divide by tokens.)",
        ),
        Mistake(
            lambda lp, mask, r: _weighed(r - r.mean(dim=1, keepdim=True), lp.exp(), mask),
            "you summed probabilities. The score is the gradient of the log-probability.",
        ),
        Mistake(
            lambda lp, mask, r: _weighed((r - r.mean(dim=1, keepdim=True)).T, lp, mask),
            "rewards and completions are out of step: the rows of a group are neighbors, so flatten (prompts, G) as it is.",
        ),
        Mistake(
            lambda lp, mask, r: _weighed(leave_one_out_advantages(r), lp, mask),
            "you left each completion out of its own mean. That is a baseline, too (RLOO), but here it is the group's mean.",
        ),
        Mistake(
            lambda lp, mask, r: _weighed(group_advantages(r), lp, mask),
            "you divided by the standard deviation. That is notebook 2; here the mean is subtracted and nothing else.",
        ),
        no_gradient(reinforce_loss),
    ],
)


def pass_at_k(n, c, k):
    """Chance that k of the n completions, drawn without putting back, hold at least one of the c right ones."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


check_pass_at_k = Exercise(
    right=pass_at_k,
    inputs=[(8, 2, 1), (8, 2, 4), (8, 0, 4), (8, 8, 3), (8, 6, 3), (16, 1, 8), (5, 2, 5)],
    mistakes=[
        Mistake(
            lambda n, c, k: 1 - (1 - c / n) ** k,
            "you put each completion back after drawing it. That is biased, and too low: draw k different ones.",
        ),
        Mistake(lambda n, c, k: c / n, "this is pass@1, whatever k is."),
        Mistake(
            lambda n, c, k: math.comb(n - c, k) / math.comb(n, k),
            "this is the chance that all k are wrong. At least one right is the rest.",
        ),
        Mistake(
            lambda n, c, k: math.comb(c, k) / math.comb(n, k),
            "this is the chance that all k are right. One is enough.",
        ),
        Mistake(
            lambda n, c, k: 1 - math.comb(c, k) / math.comb(n, k),
            "this is the chance that not all k are right. Count the ways to draw only wrong ones: n − c of them are wrong.",
        ),
        Mistake(
            lambda n, c, k: float(c > 0),
            "this asks whether any of all n is right. Only k of them may be handed in.",
        ),
        Mistake(
            lambda n, c, k: min(1.0, k * c / n),
            "chances of events that can happen together do not add up.",
        ),
    ],
)
