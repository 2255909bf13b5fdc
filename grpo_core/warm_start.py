"""The start policy: a TinyGPT that was taught to add, but not to the end.

Supervised fine-tuning on true answers, in small batches, stopped early where the greedy policy is right on about 35 % of the
validation problems. Small batches matter: such a policy almost knows much more than it says (its pass@8 is far above its
accuracy), and that is what reinforcement learning can bring out. The result is shipped, so that everybody starts alike.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_core.checkpoint import CheckpointError, read_file, write_atomically
from grpo_core.policy import TinyGPT
from grpo_core.task import Addition

START_POLICY = Path(__file__).parent / "data" / "start_policy.pt"
MAX_LENGTH = 16
# Chosen on validation problems. At this point training is fast and chaotic: rounding on another processor is enough to end
# anywhere between 0.3 and 0.7. The shipped file is what everybody starts from.
RECIPE = {"seed": 0, "steps": 484, "batch_size": 32, "learning_rate": 2e-3}


def warm_start(path: Path | str = START_POLICY) -> TinyGPT:
    """The shipped start policy, greedy accuracy 0.35 on held-out sums.

    Args:
        path: another file that `save_policy` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, or not a TinyGPT for `Addition`.
    """
    return load_policy(path, Addition, MAX_LENGTH)


def load_policy(path: Path | str, task, max_length: int) -> TinyGPT:
    """A TinyGPT for a task, with the weights that `save_policy` wrote.

    Args:
        path: the file.
        task: gives `vocab`; a task or its class.
        max_length: of the policy's context.

    Raises:
        CheckpointError: the file is missing, damaged, or of a policy with another vocabulary or context.
    """
    policy = TinyGPT(len(task.vocab), max_length=max_length)
    weights = read_file(path)
    try:
        policy.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        name = getattr(task, "__name__", type(task).__name__)
        raise CheckpointError(f"{path} does not hold a start policy for {name}: other names or shapes") from error
    return policy


def save_policy(policy: TinyGPT, path: Path | str) -> None:
    """Write a policy's weights for `warm_start`. The same weights give the same bytes."""
    write_atomically(path, lambda file: torch.save(policy.state_dict(), file))


def fine_tune(
    task: Addition,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> TinyGPT:
    """Teach a fresh TinyGPT true answers from `task.train`, by cross-entropy on the answer and its EOS.

    Args:
        task: its validation and held-out problems are never used.
        steps: gradient steps.
        batch_size: problems in a step, drawn with repetition.
        learning_rate: of AdamW with betas 0.9 and 0.99.
        seed: of the weights and the batches.
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}")
    generator = torch.Generator().manual_seed(seed)
    policy = init_weights(TinyGPT(len(task.vocab), max_length=MAX_LENGTH), generator)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.99), fused=True)
    prompts = torch.tensor([task.encode(problem.prompt) for problem in task.train])
    answers = [task.encode(problem.answer) + [task.eos_id] for problem in task.train]
    longest = max(map(len, answers))
    targets = torch.tensor([answer + [IGNORE] * (longest - len(answer)) for answer in answers])
    for _ in range(steps):
        batch = torch.randint(len(prompts), (batch_size,), generator=generator)
        loss = answer_loss(policy, prompts[batch], targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


IGNORE = -100  # The target that cross_entropy skips.


def answer_loss(policy: TinyGPT, prompt_ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the answers (N, T), given the prompts (N, P)."""
    token_ids = torch.cat([prompt_ids, targets.clamp(min=0)], dim=1)
    logits = policy(token_ids)[:, prompt_ids.shape[1] - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def init_weights(policy: TinyGPT, generator: torch.Generator, std: float = 0.02) -> TinyGPT:
    """Draw each matrix from N(0, std²), as GPT-2 does, and set each bias of a linear layer to 0."""
    for module in policy.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std, generator=generator)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return policy
