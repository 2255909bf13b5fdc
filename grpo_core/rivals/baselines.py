"""A study of baselines: how close each comes to the true value of a prompt, and how noisy it leaves the gradient.

The start policy is sure enough that some twenty completions hold nearly all probability of a prompt. Listed with their exact
probabilities, rewards and scores, they make the variance of every estimator linear algebra: nothing about noise is sampled.
Left out: the noise that comes from the choice of prompts, which no baseline touches.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_core.config import GRPOConfig
from grpo_core.evaluate import Estimate, mean_estimate, success_probability
from grpo_core.grpo import sample_iteration
from grpo_core.rivals.budget import shuffled_batches
from grpo_core.rollout import device_of, encode_prompts, padding, sample_groups, token_log_probs
from grpo_core.task import Problem

BASELINES = ("none", "batch mean", "group mean", "leave one out", "exact value", "best constant")
REWARDS = {"{0, 1}": 0.0, "{5, 6}": 5.0, "{−1, 0}": -1.0}  # How they are written, and what is added to 0 and 1.


@dataclass(frozen=True)
class Enumerated:
    """The likely completions of one prompt. C completions, most likely first.

    The score of a completion is the gradient of its log-probability by all weights of the policy.

    Attributes:
        problem: the prompt and its answer.
        texts: C completions.
        probabilities: (C,) exact; their sum, `mass`, is a little below 1.
        rewards: (C,).
        gram: (C, C), the inner products of their scores; the diagonal holds squared norms.
    """

    problem: Problem
    texts: list[str]
    probabilities: Tensor
    rewards: Tensor
    gram: Tensor

    @property
    def mass(self) -> float:
        return self.probabilities.sum().item()

    @property
    def weights(self) -> Tensor:
        """(C,) probabilities given that one of these completions is drawn. They sum to 1."""
        return self.probabilities / self.probabilities.sum()

    @property
    def value(self) -> float:
        """The expected reward: the baseline that a perfect critic would give."""
        return (self.weights @ self.rewards).item()


def enumerate_completions(
    policy, task, problem: Problem, temperature: float = 0.7, threshold: float = 1e-4, max_new_tokens: int | None = None
) -> Enumerated:
    """List each completion of at least this probability, with its reward and its score.

    Args:
        policy: scored in float32 or its own better precision; everything after that is float64.
        temperature: of sampling, and of the scores.
        threshold: a beginning that is less likely is not followed.
        max_new_tokens: a completion is cut off here; the task's own limit by default.

    Raises:
        ValueError: no completion is that likely.
    """
    prompt_ids, _ = encode_prompts(task, [problem], device_of(policy))
    rows = likely_completions(policy, prompt_ids, task.eos_id, temperature, threshold, max_new_tokens or task.max_new_tokens)
    if not rows:
        raise ValueError(f"no completion of {problem.prompt!r} has probability {threshold}: lower the threshold")
    log_probs, scores = [], []
    for row in rows:
        ids = torch.tensor([row], device=prompt_ids.device)
        log_prob = token_log_probs(policy, prompt_ids, ids, temperature).sum()
        score = torch.autograd.grad(log_prob, list(policy.parameters()))
        log_probs.append(log_prob.detach())
        scores.append(torch.cat([part.flatten() for part in score]))
    order = torch.stack(log_probs).argsort(descending=True)
    texts = [task.decode(rows[i]) for i in order.tolist()]
    rewards = torch.tensor([float(task.verify(text, problem.answer)) for text in texts], dtype=torch.float64)
    score = torch.stack(scores)[order].double()
    return Enumerated(problem, texts, torch.stack(log_probs)[order].double().exp(), rewards, score @ score.T)


@torch.no_grad()
def likely_completions(
    policy, prompt_ids: Tensor, eos_id: int, temperature: float, threshold: float, max_new_tokens: int
) -> list[list[int]]:
    """Token ids of each completion of one prompt, (1, P), that has at least this probability. They are grown token by token."""
    beginnings, log_probs, found = prompt_ids[:, :0], torch.zeros(1, 1, device=prompt_ids.device), []
    for length in range(1, max_new_tokens + 1):
        logits = policy(torch.cat([prompt_ids.expand(len(beginnings), -1), beginnings], dim=1))[:, -1]
        log_probs = log_probs + (logits / temperature).log_softmax(dim=-1)
        parents, tokens = (log_probs >= math.log(threshold)).nonzero(as_tuple=True)
        beginnings, log_probs = torch.cat([beginnings[parents], tokens[:, None]], dim=1), log_probs[parents, tokens][:, None]
        ended = (tokens == eos_id) | (length == max_new_tokens)
        found += beginnings[ended].tolist()
        beginnings, log_probs = beginnings[~ended], log_probs[~ended]
        if not len(beginnings):
            break
    return found


def gradient_variance(
    completions: Enumerated, baseline: str, group_size: int = 8, offset: float = 0.0, batch_mean: float | None = None
) -> float:
    """Total variance of one group's estimate of the gradient of the expected reward, E|g|² − |E g|².

    g = 1/G · Σ (reward_i − baseline_i) · score_i        over the group's completions i

    Args:
        completions: all that the policy may say, as far as it matters.
        baseline: one of BASELINES.
        group_size: G.
        offset: added to every reward.
        batch_mean: what "batch mean" takes off, before the offset. In a large batch it does not depend on this group.

    Raises:
        ValueError: an unknown baseline, `group_size` < 2, or no `batch_mean` where it is needed.
    """
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, got {group_size}")
    weights, rewards, gram = completions.weights, completions.rewards + offset, completions.gram
    if baseline in ("group mean", "leave one out"):
        variance = leave_one_out_variance(weights, rewards, gram, group_size)
        return variance * gradient_scale(baseline, group_size) ** 2
    taken_off = constant_baseline(completions, baseline, offset, batch_mean)
    return variance_of(weights, torch.diag(rewards - taken_off), gram).item() / group_size


def gradient_scale(baseline: str, group_size: int) -> float:
    """E g as a multiple of the exact gradient. The group's mean holds each completion's own reward, which shrinks it.

    >>> gradient_scale("group mean", 8), gradient_scale("leave one out", 8)
    (0.875, 1.0)
    """
    return 1 - 1 / group_size if baseline == "group mean" else 1.0


def constant_baseline(completions: Enumerated, baseline: str, offset: float = 0.0, batch_mean: float | None = None) -> float:
    """The number that a baseline takes off each reward of this prompt, for the kinds that do not look at the group.

    The quietest of all constants is not the expected reward E[r]. It weighs each reward by the size of its score s:

    b* = E[ r · |s|² ] / E[ |s|² ]

    Rare completions have the large scores. On an easy prompt these are wrong, and b* lies below E[r]; on a hard one they
    are right, and it lies above. With two answers, one weight and success probability p, E[r] is p and b* is 1 − p.

    Source: Greensmith et al. 2004.
    """
    if baseline == "batch mean" and batch_mean is None:
        raise ValueError("the batch mean depends on the other prompts: give batch_mean")
    squared = completions.weights * completions.gram.diagonal()
    constants = {
        "none": -offset,
        "batch mean": batch_mean,
        "exact value": completions.value,
        "best constant": (squared @ completions.rewards / squared.sum()).item(),
    }
    if baseline not in constants:
        raise ValueError(f"baseline must be one of {', '.join(map(repr, BASELINES))}; got {baseline!r}")
    return offset + constants[baseline]


def variance_of(weights: Tensor, coefficients: Tensor, gram: Tensor) -> Tensor:
    """Total variance of the vector Σ_c coefficients[x, c] · score_c when x is drawn with `weights`.

    Args:
        weights: (X,), summing to 1.
        coefficients: (X, C).
        gram: (C, C), inner products of the scores.
    """
    mean = weights @ coefficients
    squares = (coefficients @ gram * coefficients).sum(dim=1)
    return weights @ squares - mean @ gram @ mean


def leave_one_out_variance(weights: Tensor, rewards: Tensor, gram: Tensor, group_size: int) -> float:
    """Variance of the leave-one-out estimate: it is the mean of h over all pairs of a group, so Hoeffding's formula holds.

    h(x, y) = ½ · (r_x − r_y) · (s_x − s_y)
    variance = 2 / (G(G − 1)) · [ 2(G − 2) · Var(E[h | x]) + Var(h) ]

    Source: Hoeffding 1948, "A class of statistics with asymptotically normal distribution".
    """
    value = weights @ rewards
    given_x = (torch.diag(rewards - value) + weights * (rewards - rewards[:, None])) / 2  # Row x: E[h | x] in scores.
    mean = weights @ given_x
    squared_distance = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    squares = (rewards[:, None] - rewards) ** 2 * squared_distance / 4
    pair_variance = weights @ squares @ weights - mean @ gram @ mean
    bracket = 2 * (group_size - 2) * variance_of(weights, given_x, gram) + pair_variance
    return (2 * bracket / (group_size * (group_size - 1))).item()


def squared_scores(completions: Enumerated) -> tuple[float, float]:
    """Expected squared norm of the score of a right completion, and of a wrong one; nan where there is none."""
    right = completions.rewards > 0
    groups = ((completions.weights[rows], completions.gram.diagonal()[rows]) for rows in (right, ~right))
    return tuple((weights @ squares / weights.sum()).item() for weights, squares in groups)


def gradient_noise(enumerated: Sequence[Enumerated], group_size: int = 8) -> pd.DataFrame:
    """For each baseline and each pair of rewards: the variance of a group's gradient, averaged over prompts.

    Columns: rewards; baseline; taken_off, its expectation; scale, see `gradient_scale`; variance; ratio, the variance of
    a gradient of the right length over that of the best constant. The last two with the low and high of their 95 % interval.
    """
    batch_mean = sum(e.value for e in enumerated) / len(enumerated)
    best = [gradient_variance(e, "best constant", group_size) for e in enumerated]
    rows = []
    for (written, offset), baseline in product(REWARDS.items(), BASELINES):
        scale = gradient_scale(baseline, group_size)
        constant = {"group mean": "exact value", "leave one out": "exact value"}.get(baseline, baseline)  # In expectation.
        taken_off = [constant_baseline(e, constant, offset, batch_mean) for e in enumerated]
        variances = [gradient_variance(e, baseline, group_size, offset, batch_mean) for e in enumerated]
        row = {"rewards": written, "baseline": baseline, "taken_off": sum(taken_off) / len(taken_off), "scale": scale}
        row |= mean_estimate(variances).columns("variance")
        rows.append(row | ratio_of_means([v / scale**2 for v in variances], best).columns("ratio"))
    return pd.DataFrame(rows)


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """mean(above) / mean(below) of paired measurements, with its 95 % interval by linearization.

    >>> ratio_of_means([2.0, 4.0], [1.0, 2.0])
    2.000 [2.000, 2.000]
    """
    bottom = sum(below) / len(below)
    ratio = sum(above) / len(above) / bottom
    error = mean_estimate([(a - ratio * b) / bottom for a, b in zip(above, below)])
    return Estimate(ratio, ratio + error.low - error.value, ratio + error.high - error.value)


def root_mean_square(errors: Tensor) -> Estimate:
    """Root of the mean square of independent errors, with its 95 % interval."""
    square = mean_estimate(errors.double().square().tolist())
    return Estimate(*(math.sqrt(max(x, 0.0)) for x in (square.value, square.low, square.high)))


def value_errors(
    policy,
    task,
    problems: Sequence[Problem],
    group_sizes: Sequence[int] = (2, 4, 8, 16, 32),
    temperature: float = 0.7,
    critics: Sequence[nn.Module] = (),
    seed: int = 0,
) -> pd.DataFrame:
    """How far each way to guess a prompt's value is from the exact one: root mean square error over `problems`.

    Columns: estimator, group_size (for "group mean"), rmse with low and high (95 %, over problems), theory: the root of
    the mean of p(1 − p)/G for a group's mean, exact for the batch's mean, nan for a critic.
    """
    values = success_probability(policy, task, problems, temperature)
    generator = torch.Generator().manual_seed(seed)
    rows = [("batch mean", math.nan, values.mean() - values, values.std(correction=0).item())]
    for size in group_sizes:
        means = sample_groups(policy, task, problems, size, temperature, generator=generator).rewards.mean(dim=1)
        rows.append(("group mean", size, means - values, (values * (1 - values) / size).mean().sqrt().item()))
    rows += [("critic", math.nan, predicted_values(critic, task, problems) - values, math.nan) for critic in critics]
    return pd.DataFrame(
        {"estimator": name, "group_size": size, **root_mean_square(errors).columns("rmse"), "theory": theory}
        for name, size, errors, theory in rows
    )


def train_critic(policy, task, seed: int = 0, steps: int = 160, learning_rate: float = 3e-4) -> nn.Module:
    """Train a critic on the verdicts of 7,680 completions: a copy of the policy with one number as its head.

    It predicts the reward from the prompt alone, by cross-entropy, in batches of 48 prompts. The labels of a prompt are
    averaged first, which leaves the gradient as it is. Its settings are the best of a small sweep on validation problems.
    """
    generator, config = torch.Generator().manual_seed(seed), GRPOConfig()
    rollouts = [sample_iteration(policy, task, config, generator, i) for i in range(1, config.iterations + 1)]
    problems = [problem for rollout in rollouts for problem in rollout.problems]
    labels = torch.cat([rollout.rewards.mean(dim=1) for rollout in rollouts])
    critic = copy.deepcopy(policy).requires_grad_(True)
    critic.head = nn.Linear(critic.head.in_features, 1)
    nn.init.zeros_(critic.head.weight)
    nn.init.constant_(critic.head.bias, labels.mean().logit().item())
    optimizer = torch.optim.AdamW(critic.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    for rows in shuffled_batches(len(problems), config.prompts_per_iteration, steps, generator):
        predicted = value_logits(critic, task, [problems[i] for i in rows.tolist()])
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(predicted, labels[rows]).backward()
        optimizer.step()
    return critic


def value_logits(critic, task, problems: Sequence[Problem]) -> Tensor:
    """(prompts,) what the critic reads off the last token of each prompt."""
    prompt_ids, mask = encode_prompts(task, problems, device_of(critic))
    return critic(prompt_ids, **padding(mask, prompt_ids.shape[1]))[:, -1, 0]


@torch.no_grad()
def predicted_values(critic, task, problems: Sequence[Problem]) -> Tensor:
    """(prompts,) the critic's guess of the probability to be right."""
    return value_logits(critic, task, problems).sigmoid()
