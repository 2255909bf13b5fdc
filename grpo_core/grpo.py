"""GRPO: sample groups, compare each completion with its own group, move the policy, stay close to the start.

The whole algorithm is this file: `train` repeats `sample_groups` and `grpo_update`; `grpo_update` takes gradient steps on
`grpo_loss`. Left out: a critic (the group's mean replaces it) and reward models.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from grpo_core import processes
from grpo_core.advantages import group_advantages
from grpo_core.checkpoint import load_checkpoint, save_checkpoint
from grpo_core.config import GRPOConfig, check_fit
from grpo_core.evaluate import greedy_accuracy
from grpo_core.history import History, TrainingDiverged, describe
from grpo_core.kl import kl_estimate
from grpo_core.rollout import Rollout, parts, sample_groups, take, token_log_probs
from grpo_core.surrogate import clip_binds, clipped_surrogate


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
        ValueError: an unknown `how`, "constant" without `max_tokens`, or shapes that do not fit.

    >>> two = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    >>> mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    >>> [aggregate(two, mask, how, max_tokens=4).item() for how in ("sequence", "token", "constant")]
    [0.0, 0.5, 0.25]
    """
    mask = completion_mask.bool()
    if per_token.shape != mask[rows].shape:
        raise ValueError(f"per_token {tuple(per_token.shape)} and its mask {tuple(mask[rows].shape)} must have the same shape")
    lengths = mask.sum(dim=1)
    sums = torch.where(mask[rows], per_token, 0.0).sum(dim=1)
    if how == "token":
        return sums.sum() / lengths.sum().clamp(min=1)
    if how == "sequence":
        return (sums / lengths[rows].clamp(min=1)).sum() / max(len(mask), 1)
    if how == "constant" and max_tokens:
        return sums.sum() / (max(len(mask), 1) * max_tokens)
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

    It knows nothing of the task. Any policy will do that `token_log_probs` can score. Of several processes, each gives its
    own rollout, of whole groups, and all take the same step: that of one process with all the groups.

    Args:
        policy: changed in place.
        reference: the frozen start policy. None saves its pass if beta is 0; then no KL is measured.
        optimizer: of the policy's parameters.
        rollout: completions with rewards; a step later they are off-policy, which is what the ratio is for.
        config: all settings.

    Returns:
        loss, clip_fraction, grad_norm: means over the gradient steps; kl: before the first of them.

    Raises:
        ValueError: beta > 0 without a reference.
        FloatingPointError: loss or gradient is not finite. The policy is left as it was before that step.
    """

    steps = []
    tokens, completions = processes.shares(rollout.completion_mask)  # Of those of all processes; alone, 1.
    share = tokens if config.aggregation == "token" else completions
    batch = parts(len(rollout.completion_ids), config.micro_batch)
    with torch.no_grad():
        ref_log_probs = [None if reference is None else score(reference, rollout, rows) for rows in batch]
    for _ in range(config.inner_epochs):
        optimizer.zero_grad()
        step = Counter()
        for rows, ref in zip(batch, ref_log_probs):
            loss, metrics = grpo_loss(score(policy, rollout, rows), rollout, ref, config, rows)
            (share * loss).backward()
            step.update({name: (share if name == "loss" else tokens) * value for name, value in metrics.items()})
        processes.add_up_gradients(policy.parameters())
        step = processes.add_up_numbers(step)
        step["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm).item()
        if not (math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])):
            optimizer.zero_grad()
            message = "loss {loss}, gradient norm {grad_norm}; the policy is as it was before that step"
            raise FloatingPointError(message.format(**step))
        optimizer.step()
        steps.append(step)
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return means if reference is None else means | {"kl": steps[0]["kl"]}  # Unbiased on the policy's own samples only.


def score(policy, rollout: Rollout, rows: slice) -> Tensor:
    """Log-probs of some rows of a rollout under a policy, at the temperature at which they were sampled."""
    ids = rollout.prompt_ids[rows], rollout.completion_ids[rows]
    return token_log_probs(policy, *ids, rollout.temperature, take(rollout.prompt_mask, rows))


def train(
    task,
    policy,
    config: GRPOConfig = GRPOConfig(),
    on_iteration: Callable[[dict, Rollout | None], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    checkpoint: Path | str | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
) -> History:
    """Train a policy with GRPO, in place. The start policy is kept as the frozen reference.

    Several processes that call it together train one policy: see processes.py.

    Args:
        task: gives `train`, the evaluation problems, and what `sample_groups` needs.
        policy: changed in place, and moved to `config.device`.
        config: all settings.
        on_iteration: called with the new row of the history and the rollout it came from (None at iteration 0). Of several
            processes, each is called with the common row and its own rollout.
        should_stop: asked before each iteration; true ends the run, on one process or on all.
        checkpoint: a file that is written after each iteration.
        resume: continue from that file. The result is that of a run that was never interrupted.
        checkpoint_every: write it only after every so many iterations, and after the last: for large policies.

    Returns:
        The history. After a stop or Ctrl-C it ends early, and the policy is whole and usable.

    Raises:
        TrainingDiverged: a loss, gradient or logit is not finite. It carries the history up to there.
        ProcessLost: another process has ended.
        CheckpointError: there is nothing to resume, or it does not fit.
        ValueError: `resume` without a checkpoint, or settings that do not fit task, policy or machine.
    """
    check_fit(config, task, policy)
    reference, optimizer, state = begin(policy, config)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    history = History(load_checkpoint(checkpoint, config, state, generator) if resume else [])
    try:
        for iteration in range(len(history.rows), config.iterations + 1):
            if should_stop is not None and processes.any_of(should_stop()):
                break
            start, row, rollout = time.perf_counter(), {"iteration": iteration}, None
            measure = iteration % config.evaluate_every == 0 or iteration == config.iterations
            if iteration > 0:
                set_learning_rate(optimizer, config, iteration)
                rollout = sample_iteration(policy, task, config, generator, iteration, config.micro_batch)
                leash = reference if measure or config.beta > 0 else None
                row |= describe(rollout, task.eos_id) | grpo_update(policy, leash, optimizer, rollout, config)
                check_alive(policy, rollout)
            if measure:
                row |= greedy_accuracy(policy, task, getattr(task, config.evaluate_on)).columns("accuracy")
            history.rows.append(row | {"seconds": time.perf_counter() - start})
            if on_iteration is not None:
                on_iteration(history.rows[-1], rollout)
            due = iteration % checkpoint_every == 0 or iteration == config.iterations
            if checkpoint is not None and due and processes.rank() == 0:
                save_checkpoint(checkpoint, config, state, generator, history.rows)
    except FloatingPointError as error:
        raise TrainingDiverged(iteration, error, config, checkpoint, history) from error
    except KeyboardInterrupt:
        pass
    return history


def begin(policy, config: GRPOConfig):
    """Reference, optimizer, and all that a checkpoint must keep. A policy may bring its own reference, or none."""
    policy.to(config.device)
    processes.start_alike(policy)
    reference = policy.reference() if hasattr(policy, "reference") else copy.deepcopy(policy).requires_grad_(False)
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0, fused=True)
    state = {"policy": policy, "optimizer": optimizer, "reference": reference}
    return reference, optimizer, {name: part for name, part in state.items() if part is not None}


def check_alive(policy, rollout: Rollout) -> None:
    """A step may be finite and yet ruin the policy. That must not become the last good checkpoint."""
    with torch.no_grad():
        scores = score(policy, rollout, slice(1))
    if processes.any_of(not torch.isfinite(scores).all()):
        raise FloatingPointError("the step left a policy whose log-probs are not finite")


def set_learning_rate(optimizer, config: GRPOConfig, iteration: int) -> None:
    left = 1 - (iteration - 1) / config.iterations
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * (left if config.schedule == "linear" else 1)


def sample_iteration(
    policy, task, config: GRPOConfig, generator: torch.Generator, iteration: int, micro_batch: int | None = None
) -> Rollout:
    """Groups for training problems drawn without repetition. The first batch holds the task's example, if it has one.

    All processes draw the same problems; each samples the groups of its share.
    """
    order = torch.randperm(len(task.train), generator=generator, device=generator.device)
    problems = [task.train[i] for i in order[: config.prompts_per_iteration].tolist()]
    if iteration == 1 and hasattr(task, "example"):
        problems[0] = task.example
    own, noise = processes.share(problems), processes.own_generator(generator)
    sampling = config.group_size, config.temperature, config.max_new_tokens
    return sample_groups(policy, task, own, *sampling, noise, micro_batch)
