"""GRPO: sample groups, compare each completion with its own group, move the policy, stay close to the start.

The whole algorithm is this file: `train` repeats `sample_groups` and `grpo_update`; `grpo_update` takes gradient steps on
`grpo_loss`. Left out: a critic (the group's mean replaces it), reward models, several machines.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
from torch import Tensor

from grpo_core.advantages import flat_groups, group_advantages
from grpo_core.checkpoint import load_checkpoint, save_checkpoint
from grpo_core.evaluate import greedy_accuracy
from grpo_core.history import History, TrainingDiverged
from grpo_core.kl import kl_estimate
from grpo_core.rollout import Rollout, check_temperature, sample_groups, token_log_probs
from grpo_core.surrogate import clip_binds, clip_range, clipped_surrogate


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
    # Source of all randomness. The same seed gives the same run on one machine.
    seed: int = 0
    # Where to compute: cpu, cuda or mps.
    device: str = "cpu"

    def __post_init__(self):
        check_temperature(self.temperature)
        clip_range(self.clip_eps, self.clip_eps_high)
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                raise ValueError(f"{field.name} must be one of {', '.join(map(repr, get_args(field.type)))}; got {value!r}")
            if field.name in AT_LEAST and value is not None and not AT_LEAST[field.name] <= value < math.inf:
                raise ValueError(f"{field.name} must be at least {AT_LEAST[field.name]}, got {value!r}")
            if field.type in (int, int | None) and value is not None and not isinstance(value, int):
                raise ValueError(f"{field.name} must be a whole number, got {value!r}")
        if self.learning_rate == 0 or self.max_grad_norm == 0:
            raise ValueError("learning_rate and max_grad_norm must be above 0: at 0 nothing is learned")


AT_LEAST = {
    "prompts_per_iteration": 1, "group_size": 2, "iterations": 1, "inner_epochs": 1, "learning_rate": 0, "beta": 0,
    "std_eps": 0, "max_new_tokens": 1, "max_grad_norm": 0, "micro_batch": 1, "evaluate_every": 1,
}  # fmt: skip


def aggregate(
    per_token: Tensor,
    completion_mask: Tensor,
    how: str = "token",
    max_tokens: int | None = None,
    rows: slice = slice(None),
) -> Tensor:
    """Average (N, T) numbers over the tokens of a batch.

    token     sum / number of tokens                     each token weighs the same (DAPO)
    sequence  mean over completions of their own means   each completion weighs the same (the GRPO paper)
    constant  sum / (N · max_tokens)                     no weight depends on a length (Dr. GRPO)

    Args:
        per_token: (N, T); what stands outside the mask is never read.
        completion_mask: (N, T), true at the tokens that count.
        how: "token", "sequence" or "constant".
        max_tokens: the divisor of "constant".
        rows: the rows of the batch that `per_token` holds. Each part is divided by the whole batch's numbers, so that
            the parts add up to the whole.

    Returns:
        A scalar; 0 if the mask is empty.

    Raises:
        ValueError: an unknown `how`, or "constant" without `max_tokens`.

    >>> two = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    >>> mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    >>> [aggregate(two, mask, how, max_tokens=4).item() for how in ("sequence", "token", "constant")]
    [0.0, 0.5, 0.25]
    """
    mask = completion_mask.bool()
    lengths = mask.sum(dim=1)
    sums = torch.where(mask[rows], per_token, 0.0).sum(dim=1)
    if how == "token":
        return sums.sum() / lengths.sum().clamp(min=1)
    if how == "sequence":
        return (sums / lengths[rows].clamp(min=1)).sum() / len(mask)
    if how == "constant" and max_tokens:
        return sums.sum() / (len(mask) * max_tokens)
    raise ValueError(f'aggregation must be "token", "sequence", or "constant" with max_tokens; got {how!r}, {max_tokens!r}')


def grpo_loss(
    log_probs: Tensor,
    rollout: Rollout,
    ref_log_probs: Tensor | None,
    config: GRPOConfig,
    rows: slice = slice(None),
) -> tuple[Tensor, dict[str, float]]:
    """The loss of GRPO: minus the clipped surrogate, plus the leash.

    loss = aggregate( − min(ratio · A, clip(ratio) · A) + beta · KL estimate )

    Args:
        log_probs: (N, T) of the policy, differentiable.
        rollout: gives advantages, old log-probs and mask.
        ref_log_probs: (N, T) of the reference; None leaves the leash out.
        config: clip_eps, clip_eps_high, beta, kl, scale, std_eps, correction, aggregation, max_new_tokens.
        rows: the rows of the rollout that `log_probs` and `ref_log_probs` hold; the losses of all parts add up.

    Returns:
        The scalar loss, and means over tokens: loss, clip_fraction, kl (k3, whatever the leash uses).

    Raises:
        ValueError: beta > 0 without `ref_log_probs`.

    Source: Shao et al. 2024, DeepSeekMath, equation 3.
    """
    if config.beta > 0 and ref_log_probs is None:
        raise ValueError("the leash (beta > 0) needs ref_log_probs; set beta to 0 to train without it")
    mask = rollout.completion_mask.bool()
    advantages = group_advantages(rollout.rewards, config.scale, config.std_eps, config.correction).flatten()[rows]
    log_probs = torch.where(mask[rows], log_probs, 0.0)  # Behind the EOS may stand anything, even inf.
    old_log_probs = torch.where(mask[rows], rollout.old_log_probs[rows], 0.0)
    clip = (log_probs, old_log_probs, advantages, config.clip_eps, config.clip_eps_high)
    per_token = -clipped_surrogate(*clip)
    metrics = {"clip_fraction": clip_binds(*clip).float()}
    if ref_log_probs is not None:
        ref_log_probs = torch.where(mask[rows], ref_log_probs, 0.0)
        metrics["kl"] = kl_estimate(log_probs.detach(), ref_log_probs, "k3")
        if config.beta > 0:
            per_token = per_token + config.beta * kl_estimate(log_probs, ref_log_probs, config.kl)
    loss = aggregate(per_token, mask, config.aggregation, config.max_new_tokens, rows)
    return loss, {"loss": loss.item()} | {name: aggregate(x, mask, rows=rows).item() for name, x in metrics.items()}


def grpo_update(policy, reference, optimizer, rollout: Rollout, config: GRPOConfig) -> dict[str, float]:
    """Improve the policy on one rollout: `inner_epochs` gradient steps on `grpo_loss`.

    It knows nothing of the task. Any policy will do that `token_log_probs` can score.

    Args:
        policy: changed in place.
        reference: the frozen start policy. None saves its pass if beta is 0; then no KL is measured.
        optimizer: of the policy's parameters.
        rollout: completions with rewards; a step later they are off-policy, which is what the ratio is for.
        config: all settings.

    Returns:
        loss, clip_fraction, kl, grad_norm: means over the gradient steps.

    Raises:
        ValueError: beta > 0 without a reference.
        FloatingPointError: loss or gradient is not finite. The policy is left as it was before that step.
    """

    def score(model, rows: slice) -> Tensor:
        prompt_mask = None if rollout.prompt_mask is None else rollout.prompt_mask[rows]
        return token_log_probs(model, rollout.prompt_ids[rows], rollout.completion_ids[rows], rollout.temperature, prompt_mask)

    steps = []
    size = config.micro_batch or len(rollout.completion_ids)
    parts = [slice(start, start + size) for start in range(0, len(rollout.completion_ids), size)]
    with torch.no_grad():
        ref_log_probs = [None if reference is None else score(reference, rows) for rows in parts]
    for _ in range(config.inner_epochs):
        optimizer.zero_grad()
        step = Counter()
        for rows, ref in zip(parts, ref_log_probs):
            loss, metrics = grpo_loss(score(policy, rows), rollout, ref, config, rows)
            loss.backward()
            step.update(metrics)
        step["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm).item()
        if not (math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])):
            optimizer.zero_grad()
            raise FloatingPointError(f"loss {step['loss']}, gradient norm {step['grad_norm']}")
        optimizer.step()
        steps.append(step)
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return means | {name: steps[0][name] for name in ("kl",) if name in means}  # Unbiased on the policy's own samples only.


def train(
    task,
    policy,
    config: GRPOConfig = GRPOConfig(),
    on_iteration: Callable[[dict, Rollout | None], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    checkpoint: Path | str | None = None,
    resume: bool = False,
) -> History:
    """Train a policy with GRPO, in place. The start policy is kept as the frozen reference.

    Args:
        task: gives `train`, the evaluation problems, and what `sample_groups` needs.
        policy: changed in place, and moved to `config.device`.
        config: all settings.
        on_iteration: called with the new row of the history and the rollout it came from (None at iteration 0).
        should_stop: asked before each iteration; true ends the run.
        checkpoint: a file that is written after each iteration.
        resume: continue from that file. The result is that of a run that was never interrupted.

    Returns:
        The history. After a stop or Ctrl-C it ends early, and the policy is whole and usable.

    Raises:
        TrainingDiverged: a loss, gradient or logit is not finite. It carries the history up to there.
        CheckpointError: there is nothing to resume, or it does not fit.
    """
    policy.to(config.device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    parts = {"policy": policy, "reference": reference, "optimizer": optimizer}
    history = History(load_checkpoint(checkpoint, config, parts, generator) if resume else [])
    try:
        for iteration in range(len(history.rows), config.iterations + 1):
            if should_stop is not None and should_stop():
                break
            start, row, rollout = time.perf_counter(), {"iteration": iteration}, None
            measure = iteration % config.evaluate_every == 0 or iteration == config.iterations
            if iteration > 0:
                rollout = sample_iteration(policy, task, config, generator, iteration)
                leash = reference if measure or config.beta > 0 else None
                row |= describe(rollout, task.eos_id) | grpo_update(policy, leash, optimizer, rollout, config)
            if measure:
                accuracy = greedy_accuracy(policy, task, getattr(task, config.evaluate_on))
                row |= {"accuracy": accuracy.value, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
            history.rows.append(row | {"seconds": time.perf_counter() - start})
            if on_iteration is not None:
                on_iteration(history.rows[-1], rollout)
            if checkpoint is not None:
                save_checkpoint(checkpoint, config, parts, generator, history.rows)
    except FloatingPointError as error:
        raise TrainingDiverged(iteration, error, config, checkpoint, history) from error
    except KeyboardInterrupt:
        pass
    return history


def sample_iteration(policy, task, config: GRPOConfig, generator: torch.Generator, iteration: int) -> Rollout:
    """Groups for training problems drawn without repetition. The first batch holds the task's example, if it has one."""
    order = torch.randperm(len(task.train), generator=generator, device=generator.device)
    problems = [task.train[i] for i in order[: config.prompts_per_iteration].tolist()]
    if iteration == 1 and hasattr(task, "example"):
        problems[0] = task.example
    return sample_groups(policy, task, problems, config.group_size, config.temperature, config.max_new_tokens, generator)


def describe(rollout: Rollout, eos_id: int) -> dict[str, float]:
    """What can be read off a rollout before any update; the columns are explained at `History`."""
    mask = rollout.completion_mask
    return {
        "reward": rollout.rewards.mean().item(),
        "flat_groups": flat_groups(rollout.rewards).float().mean().item(),
        "entropy": -aggregate(rollout.old_log_probs, mask).item(),
        "completion_length": mask.sum(dim=1).float().mean().item(),
        "unfinished": (rollout.completion_ids != eos_id).all(dim=1).float().mean().item(),
    }
