"""How good a policy is: greedy accuracy with its interval, pass@k, and the exact probability of being right.

An accuracy without an interval says little: on 400 problems the 95 % interval is nearly ±5 points. Left out: everything
but exact answers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_core import processes
from grpo_core.rollout import device_of, encode_prompts, generate, sample_groups, token_log_probs
from grpo_core.task import Problem

Z = 1.959964  # 97.5 % of the normal distribution lie below it.
STUDENT_T = (  # The same of Student's t with 1, 2, … 30 degrees of freedom, which small samples need.
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


class Estimate(float):
    """A measured number with its 95 % interval. It behaves as the number itself.

    >>> Estimate(0.36, 0.31, 0.41)
    0.360 [0.310, 0.410]
    """

    def __new__(cls, value: float, low: float, high: float):
        estimate = super().__new__(cls, value)
        estimate.low, estimate.high = low, high
        return estimate

    def __getnewargs__(self):
        return float(self), self.low, self.high

    @property
    def value(self) -> float:
        return float(self)

    def columns(self, name: str) -> dict[str, float]:
        """Value and interval as three named numbers, for a row of a table."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __repr__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    __str__ = __repr__


def proportion(successes: int, trials: int) -> Estimate:
    """successes / trials with Wilson's 95 % interval, which stays inside [0, 1] and is right at its ends.

    Source: Wilson 1927.

    >>> proportion(144, 400)
    0.360 [0.314, 0.408]
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes in {trials} trials: give at least one trial and no more successes than trials")
    p, square = successes / trials, Z * Z / trials
    center = (p + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(p * (1 - p) / trials + square / (4 * trials))
    return Estimate(p, max(0.0, min(p, center - half)), min(1.0, max(p, center + half)))  # Rounding must not shut p out.


def greedy_completions(policy, task, problems: Sequence[Problem]) -> list[str]:
    """The completion of each problem that takes the most likely token at each step."""
    prompt_ids, prompt_mask = encode_prompts(task, problems, device_of(policy))
    ids = generate(policy, prompt_ids, prompt_mask, 1, task.max_new_tokens, task.eos_id, lambda logits: logits.argmax(dim=-1))
    return [task.decode(row) for row in ids.tolist()]


def greedy_accuracy(policy, task, problems: Sequence[Problem]) -> Estimate:
    """Share of problems that the greedy completion gets right, with its 95 % interval over problems.

    Several processes divide the problems between them; all of them must call it.
    """
    own = processes.share(problems)
    completions = greedy_completions(policy, task, own) if own or not problems else []
    right = sum(task.verify(text, problem.answer) for text, problem in zip(completions, own))
    return proportion(int(processes.add_up_numbers({"right": right})["right"]), len(problems))


def pass_at_k(
    policy,
    task,
    problems: Sequence[Problem],
    k: int,
    samples: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Chance that at least one of k completions is right, averaged over problems.

    With c right ones among n samples of a problem, 1 − C(n − c, k) / C(n, k) is unbiased; 1 − (1 − c/n)^k is not.

    Args:
        k: completions that one may hand in.
        samples: completions drawn for each problem, n >= k.
        temperature: of the sampling.

    Returns:
        The mean, with its 95 % interval over problems.

    Raises:
        ValueError: k < 1, or fewer samples than k.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code".
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must lie between 1 and samples, got k {k} and samples {samples}")
    rollout = sample_groups(policy, task, problems, max(samples, 2), temperature, generator=generator)
    right = (rollout.rewards[:, :samples] == 1).sum(dim=1).tolist()
    return mean_estimate([1 - math.comb(samples - c, k) / math.comb(samples, k) for c in right])


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent measurements with Student's 95 % interval; a single value has none (nan).

    >>> mean_estimate([0.7, 0.8, 0.75])
    0.750 [0.626, 0.874]
    """
    x = torch.as_tensor(values, dtype=torch.float64)
    if len(x) == 0:
        raise ValueError("no values to average: give at least one")
    quantile = STUDENT_T[len(x) - 2] if len(x) < len(STUDENT_T) + 2 else Z
    half = quantile * (x.std() / math.sqrt(len(x))).item() if len(x) > 1 else math.nan
    return Estimate(x.mean().item(), x.mean().item() - half, x.mean().item() + half)


@torch.no_grad()
def success_probability(policy, task, problems: Sequence[Problem], temperature: float = 1.0) -> Tensor:
    """(prompts,) exact probability that a sampled completion is right: the true value of each prompt.

    One answer is right, so it is the product of the probabilities of its tokens, EOS included. No sampling is needed.
    """
    prompt_ids, prompt_mask = encode_prompts(task, problems, device_of(policy))
    answers = [task.encode(problem.answer) + [task.eos_id] for problem in problems]
    longest = max(map(len, answers))
    ids = torch.tensor([row + [task.eos_id] * (longest - len(row)) for row in answers], device=prompt_ids.device)
    real = torch.tensor([[t < len(row) for t in range(longest)] for row in answers], device=prompt_ids.device)
    log_probs = token_log_probs(policy, prompt_ids, ids, temperature, prompt_mask)
    return torch.where(real, log_probs, 0.0).sum(dim=1).exp()
