"""A policy that decides nothing but when to stop: what each way of averaging the loss does to length.

An answer starts right or wrong, with even chances, and the reward says which. After that the policy goes on and on until
it stops, with one stop probability after a right start and another after a wrong one. The reward does not depend on the
length, so whatever happens to the length is the doing of the average alone. Left out: everything else.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_core.advantages import group_advantages
from grpo_core.grpo import aggregate

START_LENGTH = 5  # Mean length at the start, of right and of wrong answers: the stop probability is 1/5.


def train_lengths(
    aggregation: str,
    groups: int = 2,
    group_size: int = 8,
    steps: int = 600,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> Tensor:
    """Policy-gradient steps on the two stop probabilities, each on fresh groups, with `aggregate` as the average.

    Args:
        aggregation: "token", "sequence" or "constant". The constant is the mean length at the start, so that the three
            take steps of about the same size at first.
        groups: in each step.
        group_size: answers in a group.
        steps: of plain gradient descent.
        learning_rate: of the stop probability's logit.
        seed: of the answers.

    Returns:
        (steps + 1, 2): mean length of wrong and of right answers, 1 / stop probability, before each step and at the end.
    """
    generator = torch.Generator().manual_seed(seed)
    stop_logits = torch.full((2,), -math.log(START_LENGTH - 1), requires_grad=True)
    history = [mean_length(stop_logits)]
    for _ in range(steps):
        right = torch.rand(groups, group_size, generator=generator) < 0.5
        advantages = group_advantages(right.float()).flatten()
        stop_logit = stop_logits[right.flatten().long()]
        log_probs, mask = answer_log_probs(sample_lengths(stop_logit, generator), stop_logit)
        loss = -aggregate(log_probs * advantages.unsqueeze(1), mask, aggregation, START_LENGTH)
        (gradient,) = torch.autograd.grad(loss, stop_logits)
        with torch.no_grad():
            stop_logits -= learning_rate * gradient
        history.append(mean_length(stop_logits))
    return torch.stack(history)


def sample_lengths(stop_logit: Tensor, generator: torch.Generator) -> Tensor:
    """(N,) lengths: tokens until the first stop, that one included. All at once, by inverting the geometric distribution."""
    uniform = 1 - torch.rand(stop_logit.shape, generator=generator)  # In (0, 1]: its logarithm is finite.
    go_on = F.logsigmoid(-stop_logit.detach())
    return (uniform.log() / go_on).floor().long() + 1


def answer_log_probs(lengths: Tensor, stop_logit: Tensor) -> tuple[Tensor, Tensor]:
    """(N, T) log-probs of the tokens of answers with these lengths, and their mask: log(1 − s) to go on, log s to stop."""
    token = torch.arange(1, int(lengths.max()) + 1)
    stops, mask = token == lengths.unsqueeze(1), token <= lengths.unsqueeze(1)
    return torch.where(stops, F.logsigmoid(stop_logit).unsqueeze(1), F.logsigmoid(-stop_logit).unsqueeze(1)), mask


def mean_length(stop_logits: Tensor) -> Tensor:
    """1 / stop probability.

    >>> mean_length(torch.tensor([0.0, -1.0986123]))
    tensor([2., 4.])
    """
    return 1 + (-stop_logits.detach()).exp()
