"""Imitation: raise the likelihood of right answers, and do nothing else. They come from the policy itself, or they are given.

Expert iteration samples, keeps what the verifier accepts, imitates that, and samples again. Supervised fine-tuning imitates
the true answers: no method that has only a verifier can see them. Left out: everything that wrong answers could teach.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grpo_core.config import check_fields, is_whole
from grpo_core.grpo import aggregate, sample_iteration
from grpo_core.rivals.budget import Budget, Ledger, adamw, shuffled_batches
from grpo_core.rollout import Rollout, device_of, encode_prompts, through_eos, token_log_probs


@dataclass(frozen=True)
class ExpertIterationConfig:
    """The settings of expert iteration."""

    # Rounds of sampling, each from the policy that the round before has left. They must divide the budget's iterations.
    rounds: int = 4
    # What is imitated: each right completion once, or, as a control, all of them: then the policy imitates itself.
    keep: Literal["right", "all"] = "right"
    # Step size of AdamW.
    learning_rate: float = 2e-4

    def __post_init__(self):
        check_fields(self)
        if not is_whole(self.rounds) or self.rounds < 1:
            raise ValueError(f"rounds must be a whole number, at least 1; got {self.rounds!r}")


@dataclass(frozen=True)
class SupervisedConfig:
    """The settings of supervised fine-tuning."""

    # Step size of AdamW.
    learning_rate: float = 2e-4

    def __post_init__(self):
        check_fields(self)


class Demonstration(NamedTuple):
    """What to imitate, as text; the completion is written with its EOS."""

    prompt: str
    completion: str


def imitation_loss(log_probs: Tensor, completion_mask: Tensor) -> Tensor:
    """− log_prob, averaged over tokens: cross-entropy. It is `reinforce_loss` with advantage 1.

    Args:
        log_probs: (N, T), differentiable.
        completion_mask: (N, T).
    """
    return aggregate(-log_probs, completion_mask)


def imitate(policy, task, demonstrations: Sequence[Demonstration], ledger: Ledger, optimizer) -> float:
    """One gradient step on the likelihood of `demonstrations`, at temperature 1; returns the loss before it."""
    prompt_ids, prompt_mask = encode_prompts(task, demonstrations, device_of(policy))
    rows = [task.encode(demonstration.completion) for demonstration in demonstrations]
    longest = max(map(len, rows))
    completion_ids = torch.tensor([row + [task.eos_id] * (longest - len(row)) for row in rows], device=prompt_ids.device)
    mask = through_eos(completion_ids, task.eos_id)
    loss = imitation_loss(token_log_probs(policy, prompt_ids, completion_ids, 1.0, prompt_mask), mask)
    ledger.step(loss, optimizer, mask)
    return loss.item()


def demonstrations_of(rollouts: Sequence[Rollout], keep: str = "right") -> list[Demonstration]:
    """What is worth imitating: each right completion once, or all completions, each as often as it was sampled.

    Right ones that come often belong to prompts that the policy knows already. Counted once, they leave room for the others.
    """
    found = []
    for rollout in rollouts:
        prompts = [problem.prompt for problem in rollout.problems for _ in range(rollout.group_size)]
        rows = zip(prompts, rollout.texts, rollout.rewards.flatten().tolist())
        found += [Demonstration(prompt, text) for prompt, text, reward in rows if keep == "all" or reward == 1]
    return found if keep == "all" else list(dict.fromkeys(found))


def train_expert_iteration(
    task, policy, budget: Budget = Budget(), config: ExpertIterationConfig = ExpertIterationConfig()
) -> Ledger:
    """Train a policy by expert iteration, in place: sample, keep what is right, imitate it, repeat.

    A step sees as many completions as a step of GRPO, or all that a round has kept, if those are fewer.

    Raises:
        ValueError: the rounds do not divide the iterations, or in a round no completion is right.

    Source: Anthony et al. 2017; for language models Singh et al. 2023 (ReST-EM).
    """
    if budget.iterations % config.rounds:
        raise ValueError(f"rounds must divide iterations, got {config.rounds} and {budget.iterations}")
    ledger, optimizer = Ledger(task, policy, budget), adamw(policy, config.learning_rate)
    generator = torch.Generator().manual_seed(budget.seed)
    size, per_round = budget.completions // budget.iterations, budget.iterations // config.rounds
    for first in range(1, budget.iterations + 1, per_round):
        rollouts = [
            ledger.sampled(sample_iteration(policy, task, budget, generator, i), verified=config.keep == "right")
            for i in range(first, first + per_round)
        ]
        kept = demonstrations_of(rollouts, config.keep)
        if not kept:
            raise ValueError("no completion of this round is right: sample more, or from a better policy")
        for step, rows in enumerate(shuffled_batches(len(kept), size, per_round * budget.inner_epochs, generator), 1):
            loss = imitate(policy, task, [kept[i] for i in rows.tolist()], ledger, optimizer)
            if step % budget.inner_epochs == 0:
                ledger.measure(loss=loss, kept=len(kept))
    return ledger


def train_supervised(task, policy, budget: Budget = Budget(), config: SupervisedConfig = SupervisedConfig()) -> Ledger:
    """Fine-tune a policy on true answers, in place: as many as the others sample completions.

    There are fewer problems than that, so some come twice.
    """
    ledger, optimizer = Ledger(task, policy, budget), adamw(policy, config.learning_rate)
    generator = torch.Generator().manual_seed(budget.seed)
    answers = [Demonstration(problem.prompt, problem.answer + task.decode([task.eos_id])) for problem in task.train]
    size = budget.completions // budget.gradient_steps
    for step, rows in enumerate(shuffled_batches(len(answers), size, budget.gradient_steps, generator), 1):
        ledger.spent["answers"] += len(rows)
        loss = imitate(policy, task, [answers[i] for i in rows.tolist()], ledger, optimizer)
        if step % budget.inner_epochs == 0:
            ledger.measure(loss=loss)
    return ledger
