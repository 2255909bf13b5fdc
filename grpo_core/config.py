"""The settings of a run, each with a sentence, its default and a check. The command line is built from this file."""

import math
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Literal, get_args, get_origin

import torch

from grpo_core import processes
from grpo_core.rollout import check_temperature
from grpo_core.surrogate import clip_range


@dataclass(frozen=True)
class GRPOConfig:
    """The settings of a run. A value that makes no sense raises a ValueError that says what would."""

    # Prompts in each iteration; a group is sampled for each.
    prompts_per_iteration: int = 48
    # Completions in a group (TRL: num_generations).
    group_size: int = 8
    # Completions are sampled, and all log-probs scored, at this temperature.
    temperature: float = 0.7
    # Rounds of sampling and updating.
    iterations: int = 20
    # Gradient steps on each rollout (TRL: num_iterations). With 1 the ratio is always 1 and the clip never acts.
    inner_epochs: int = 2
    # Step size of AdamW.
    learning_rate: float = 2e-4
    # Keep the step size, or let it fall in a straight line to 0 over the iterations: for long runs.
    schedule: Literal["constant", "linear"] = "constant"
    # How far below 1 a ratio is trusted, and above (TRL: epsilon).
    clip_eps: float = 0.2
    # How far above 1, if that is to differ: clip-higher (TRL: epsilon_high).
    clip_eps_high: float | None = None
    # Strength of the KL leash to the start policy; 0 takes it off.
    beta: float = 0.08
    # Estimator of the KL in the leash.
    kl: Literal["k1", "k2", "k3"] = "k3"
    # Divide advantages by the group's standard deviation, or by nothing: Dr. GRPO (TRL: scale_rewards).
    scale: Literal["std", "none"] = "std"
    # Added to the standard deviation.
    std_eps: float = 1e-4
    # 0 for the population standard deviation, 1 for the sample one, as in TRL.
    correction: Literal[0, 1] = 0
    # Mean over all tokens, over each completion first, or a sum with a constant divisor (TRL: dapo, grpo, dr_grpo).
    aggregation: Literal["token", "sequence", "constant"] = "token"
    # A completion is cut off here; also the divisor of the constant aggregation.
    max_new_tokens: int = 4
    # A larger gradient is scaled down to this norm.
    max_grad_norm: float = 1.0
    # Completions scored at a time, to save memory; None scores all at once. The gradient is the same.
    micro_batch: int | None = None
    # Greedy accuracy is measured every so many iterations, and after the last.
    evaluate_every: int = 1
    # Problems to measure it on: validation for choosing settings, held_out for reporting.
    evaluate_on: Literal["held_out", "validation"] = "held_out"
    # Source of all randomness. The same seed gives the same run on one machine's CPU.
    seed: int = 0
    # Where to compute: cpu, cuda or mps.
    device: str = "cpu"

    def __post_init__(self):
        check_temperature(self.temperature)
        clip_range(self.clip_eps, self.clip_eps_high)
        check_fields(self)


def check_fields(settings) -> None:
    """Check each field of a dataclass of settings: a known choice, a whole number, not below its least value."""
    for field in fields(settings):
        name, value = field.name, getattr(settings, field.name)
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(field.type)))}; got {value!r}")
        if field.type in (int, int | None) and value is not None and not is_whole(value):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        if name in AT_LEAST and value is not None and not AT_LEAST[name] <= value < math.inf:
            raise ValueError(f"{name} must be at least {AT_LEAST[name]} and finite, got {value!r}")
        if name in POSITIVE and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value!r}: at 0 nothing is learned")
        if name == "seed" and not -(2**63) <= value < 2**63:
            raise ValueError(f"seed must fit into 64 bits, got {value}")


def is_whole(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


AT_LEAST = {
    "prompts_per_iteration": 1, "group_size": 2, "iterations": 1, "inner_epochs": 1, "learning_rate": 0, "beta": 0,
    "std_eps": 0, "max_new_tokens": 1, "max_grad_norm": 0, "micro_batch": 1, "evaluate_every": 1,
}  # fmt: skip
POSITIVE = {"learning_rate", "max_grad_norm"}


def check_fit(config: GRPOConfig, task, policy) -> None:
    """Say before any work what cannot work with this task, policy or machine; raises a ValueError."""
    if config.prompts_per_iteration < processes.count():
        raise ValueError(f"prompts_per_iteration must be at least {processes.count()}: each process needs a group of its own")
    if config.prompts_per_iteration > len(task.train):
        raise ValueError(f"prompts_per_iteration must be at most {len(task.train)}, the number of training problems")
    prompt = max((problem.prompt for problem in task.train), key=len)
    longest = len(task.encode(prompt)) + config.max_new_tokens
    if longest > getattr(policy, "max_length", longest):
        raise ValueError(
            f"max_new_tokens {config.max_new_tokens} is too large: with the longest prompt that makes {longest} tokens, "
            f"and this policy's context holds {policy.max_length}"
        )
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {config.device!r} cannot be used on this machine") from error
