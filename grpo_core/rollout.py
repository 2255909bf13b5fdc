"""Rollouts: groups of completions sampled from a policy, with everything an update needs to know about them.

The rows of a group are neighbors: row i belongs to prompt i // group_size. What the rows of a group share, their prompt and
often whole completions, is read once, for sampling and for scoring alike. Left out: top-k and top-p, which would change
the distribution that the log-probs describe.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_core.policy import KVCache, TinyGPT
from grpo_core.task import Problem


@dataclass
class Rollout:
    """Completions of one policy, group by group. N = prompts * group_size rows, prompt length P, completion length T.

    Attributes:
        prompt_ids: (N, P), padded on the left where prompts differ in length.
        completion_ids: (N, T); what stands behind the first EOS is filling.
        completion_mask: (N, T) bool, true through the first EOS, included: the tokens that are trained.
        old_log_probs: (N, T), log-probs of the tokens under the policy that sampled them, at `temperature`.
        rewards: (prompts, group_size).
        temperature: at which the completions were sampled, and at which they must be scored.
        texts: the N completions as text.
        problems: the problem of each group.
        prompt_mask: (N, P) bool, false at the padding; None where there is none.
    """

    prompt_ids: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    old_log_probs: Tensor
    rewards: Tensor
    temperature: float
    texts: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    prompt_mask: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]


def sample_groups(
    policy,
    task,
    problems: Sequence[Problem],
    group_size: int = 8,
    temperature: float = 0.7,
    max_new_tokens: int | None = None,
    generator: torch.Generator | None = None,
    micro_batch: int | None = None,
) -> Rollout:
    """Sample a group of completions for each problem and let the task's verifier reward them.

    Args:
        policy: a TinyGPT, a module that is called like one and keeps its keys and values in a `KVCache`, or one that brings
            its own `complete`, as `bridge.CausalLM` does.
        task: gives `encode`, `decode`, `verify`, `eos_id` (one id, or several that all end a completion).
        problems: one group is sampled for each.
        group_size: completions in a group.
        temperature: the logits are divided by it; below 1 the policy is sharper, above 1 flatter.
        max_new_tokens: a completion is cut off here; the task's own limit by default.
        generator: the source of randomness, on the policy's device. It moves on with each call.
        micro_batch: completions scored at a time; give an update the same number, and its first ratio is exactly 1.

    Raises:
        ValueError: `group_size` < 2, `temperature` <= 0, `max_new_tokens` < 1, no problems, or more tokens than the policy's
            context can hold.
        FloatingPointError: the policy's logits are not finite.
    """
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, got {group_size}: a completion is judged against its group")
    check_temperature(temperature)
    length = task.max_new_tokens if max_new_tokens is None else max_new_tokens
    if length < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {length}")

    def draw(logits: Tensor) -> Tensor:
        probabilities = at_temperature(logits, temperature).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    prompt_ids, prompt_mask = encode_prompts(task, problems, device_of(policy))
    completion_ids = generate(policy, prompt_ids, prompt_mask, group_size, length, task.eos_id, draw)
    prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
    prompt_mask = None if prompt_mask is None else prompt_mask.repeat_interleave(group_size, dim=0)
    texts = [task.decode(row) for row in completion_ids.tolist()]
    answers = [problem.answer for problem in problems for _ in range(group_size)]
    rewards = torch.tensor([float(task.verify(*pair)) for pair in zip(texts, answers)], device=prompt_ids.device)
    return Rollout(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_mask=through_eos(completion_ids, task.eos_id),
        old_log_probs=score_in_parts(policy, prompt_ids, completion_ids, temperature, prompt_mask, micro_batch),
        rewards=rewards.view(len(problems), group_size),
        temperature=temperature,
        texts=texts,
        problems=problems,
        prompt_mask=prompt_mask,
    )


def token_log_probs(
    policy,
    prompt_ids: Tensor,
    completion_ids: Tensor,
    temperature: float = 1.0,
    prompt_mask: Tensor | None = None,
) -> Tensor:
    """Log-probability of each completion token, given all tokens before it.

    log_probs[i, t] = log softmax(logits(prompt_i, completion_i[:t]) / temperature)[completion_i[t]]

    Differentiable. The policy is scored in eval mode: with dropout, two passes of the same weights would disagree.

    Args:
        policy: a module that maps token ids (N, L) to logits (N, L, vocabulary), directly or as `.logits`. With a
            `prompt_mask` it is also given `attention_mask` and `position_ids`, as Hugging Face models are. One that brings
            its own `completion_logits`, as `bridge.CausalLM` does, is asked for those.
        prompt_ids: (N, P).
        completion_ids: (N, T).
        temperature: the one at which the completions were sampled.
        prompt_mask: (N, P), false at left padding. Positions count real tokens only.

    Returns:
        (N, T), in nats; also behind the EOS, where the numbers mean nothing.

    Raises:
        ValueError: `temperature` <= 0, or prompts and completions that do not have the same number of rows.
    """
    check_temperature(temperature)
    if prompt_ids.shape[0] != completion_ids.shape[0]:
        raise ValueError(f"{prompt_ids.shape[0]} prompts but {completion_ids.shape[0]} completions: give each its own row")
    with eval_mode(policy):
        if isinstance(policy, TinyGPT):
            logits = shared_logits(policy, prompt_ids, completion_ids, prompt_mask)
        elif hasattr(policy, "completion_logits"):
            logits = policy.completion_logits(prompt_ids, completion_ids, prompt_mask)
        else:
            logits = completion_logits(policy, prompt_ids, completion_ids, prompt_mask)
    return at_temperature(logits, temperature).log_softmax(dim=-1).gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def score_in_parts(policy, prompt_ids, completion_ids, temperature, prompt_mask, micro_batch) -> Tensor:
    """(N, T) log-probs, scored in the parts in which an update scores, so that its first ratio is exactly 1."""
    scores = [
        token_log_probs(policy, prompt_ids[rows], completion_ids[rows], temperature, take(prompt_mask, rows))
        for rows in parts(len(prompt_ids), micro_batch)
    ]
    return torch.cat(scores)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits of the policy that samples at this temperature, in float32 or better; the largest is moved to 0."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits - logits.amax(dim=-1, keepdim=True).detach()) / temperature


def completion_logits(policy, prompt_ids: Tensor, completion_ids: Tensor, prompt_mask: Tensor | None) -> Tensor:
    """(N, T, vocabulary) logits that predict the completion: those of the last prompt token up to the last but one."""
    token_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    mask = None if prompt_mask is None else extend(prompt_mask, completion_ids.shape[1])
    output = policy(token_ids, **padding(mask, token_ids.shape[1]))
    return getattr(output, "logits", output)[:, prompt_ids.shape[1] - 1 : -1]


def shared_logits(policy: TinyGPT, prompt_ids: Tensor, completion_ids: Tensor, prompt_mask: Tensor | None) -> Tensor:
    """The same logits, but equal rows are read once, and so are equal prompts. Gradients flow through the shared cache.

    In a group of 8, about half of the completions are copies of another. The sharper the policy, the more is saved.
    """
    length = prompt_ids.shape[1]
    real = torch.ones_like(prompt_ids) if prompt_mask is None else prompt_mask.long()
    rows = torch.cat([real, prompt_ids, completion_ids], dim=1).cpu()  # Not every device can tell equal rows apart.
    distinct, row = rows.unique(dim=0, return_inverse=True)
    prompts, prompt = distinct[:, : 2 * length].unique_consecutive(dim=0, return_inverse=True)
    prompts, prompt, distinct, row = (x.to(prompt_ids.device) for x in (prompts, prompt, distinct, row))
    mask = None if prompt_mask is None else prompts[:, :length].bool()
    completions = distinct[:, 2 * length : -1]
    cache = KVCache()
    first = policy(prompts[:, length:], cache=cache, **padding(mask, length))[:, -1:].index_select(0, prompt)
    cache.take(prompt)
    mask = None if mask is None else extend(mask[prompt], completions.shape[1])
    rest = policy(completions, cache=cache, **padding(mask, completions.shape[1]))
    return torch.cat([first, rest], dim=1).index_select(0, row)


@torch.no_grad()
def generate(
    policy,
    prompt_ids: Tensor,
    prompt_mask: Tensor | None,
    group_size: int,
    max_new_tokens: int,
    eos_id: int | Sequence[int],
    choose: Callable[[Tensor], Tensor],
) -> Tensor:
    """Complete each prompt `group_size` times; `choose` turns (N, vocabulary) logits into N tokens. Returns (N, T).

    Completions of a group begin alike. Each distinct beginning is read once; `branch` says which one a row is on.
    """
    if hasattr(policy, "complete"):
        return policy.complete(prompt_ids, prompt_mask, group_size, max_new_tokens, eos_id, choose)
    branch = torch.arange(len(prompt_ids), device=prompt_ids.device).repeat_interleave(group_size)
    finished = torch.zeros_like(branch, dtype=torch.bool)
    cache, mask, completion = KVCache(), prompt_mask, []
    with eval_mode(policy):
        logits = policy(prompt_ids, cache=cache, **padding(mask, prompt_ids.shape[1]))[:, -1]
        while True:
            check_finite(logits)
            completion.append(torch.where(finished, filling(eos_id), choose(logits[branch])))
            if len(completion) == max_new_tokens:
                return torch.stack(completion, dim=1)
            finished |= is_eos(completion[-1], eos_id)
            vocabulary = logits.shape[1]
            beginnings, branch = (branch * vocabulary + completion[-1]).unique(return_inverse=True)
            parents, tokens = beginnings // vocabulary, beginnings % vocabulary
            cache.take(parents)
            mask = None if mask is None else extend(mask[parents], 1)
            logits = policy(tokens.unsqueeze(1), cache=cache, **padding(mask, 1))[:, -1]


def parts(rows: int, micro_batch: int | None) -> list[slice]:
    """All rows, so many at a time; None takes them all at once."""
    size = micro_batch or rows
    return [slice(start, start + size) for start in range(0, rows, size)]


def take(mask: Tensor | None, rows: slice) -> Tensor | None:
    return None if mask is None else mask[rows]


def extend(mask: Tensor, count: int) -> Tensor:
    """The mask with `count` more real tokens on the right."""
    return torch.cat([mask.bool(), mask.new_ones(len(mask), count, dtype=torch.bool)], dim=1)


def padding(mask: Tensor | None, count: int) -> dict[str, Tensor]:
    """What a policy must be told of padding when it reads the last `count` tokens: mask and positions, or nothing."""
    return {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)[:, mask.shape[1] - count :]}


def encode_prompts(task, problems: Sequence[Problem], device) -> tuple[Tensor, Tensor | None]:
    """Token ids (prompts, P), padded on the left, and the mask of real tokens, or None if all have the same length."""
    if not problems:
        raise ValueError("no problems to sample for: give at least one")
    rows = [task.encode(problem.prompt) for problem in problems]
    if not all(rows):
        raise ValueError("a prompt is empty: it needs at least one token")
    longest = max(map(len, rows))
    ids = torch.tensor([[filling(task.eos_id)] * (longest - len(row)) + row for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return ids, None
    return ids, torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)


def is_eos(token_ids: Tensor, eos_id: int | Sequence[int]) -> Tensor:
    """Where a completion ends. Most tasks have one EOS; models of Hugging Face may have several.

    >>> is_eos(torch.tensor([5, 6, 2]), 2), is_eos(torch.tensor([5, 6, 2]), (2, 5))
    (tensor([False, False,  True]), tensor([ True, False,  True]))
    """
    return torch.isin(token_ids, torch.as_tensor(eos_id, device=token_ids.device))


def filling(eos_id: int | Sequence[int]) -> int:
    """What stands where nothing is read, behind the end and in left padding: an EOS. Masks tell it from a real one."""
    return eos_id if isinstance(eos_id, int) else eos_id[0]


def through_eos(completion_ids: Tensor, eos_id: int | Sequence[int]) -> Tensor:
    """(N, T) bool: true through the first EOS, included; all true in a row that never ends.

    It looks for the first EOS, never for padding: the two may share an id.

    >>> through_eos(torch.tensor([[5, 6, 2, 0], [5, 6, 7, 8], [2, 0, 0, 0]]), eos_id=2).int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1],
            [1, 0, 0, 0]], dtype=torch.int32)
    """
    ends = is_eos(completion_ids, eos_id)
    return ends.cumsum(dim=1) - ends.long() == 0


def positions(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones; padding gets 0.

    >>> positions(torch.tensor([[0, 0, 1, 1, 1]]))
    tensor([[0, 0, 0, 1, 2]])
    """
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature must be a positive number, got {temperature}: at 0, greedy decoding, all completions of a "
            "group are the same and nothing can be compared; greedy_accuracy measures the greedy policy"
        )


def check_finite(logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        raise FloatingPointError("the policy's logits are not finite: its weights were lost in an earlier step")


def device_of(policy) -> torch.device:
    return next(policy.parameters()).device


@contextmanager
def eval_mode(policy):
    """Switch dropout and the like off, then back to how it was."""
    was_training = getattr(policy, "training", False)
    if was_training:
        policy.eval()
    try:
        yield
    finally:
        if was_training:
            policy.train()
