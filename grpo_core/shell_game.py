"""The shell game: a ball under one of four cups, and a number of swaps. A task on which showing the steps pays.

One problem is a prompt such as "3bace": the ball is under cup 3, then four swaps follow, a letter each. The policy may answer
at once, "=4;", or first show where the ball is after each swap, ">1>2>2=4;". A direct answer has to follow all swaps inside
two layers; a shown cup asks for one swap only. The verifier reads nothing but the answer. Left out: rewards for steps.
"""

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from grpo_core.grpo import aggregate
from grpo_core.policy import TinyGPT
from grpo_core.rollout import encode_prompts, through_eos, token_log_probs
from grpo_core.task import Problem
from grpo_core.warm_start import init_weights, load_policy

CUPS = "1234"
SWAPS = {"a": "12", "b": "13", "c": "14", "d": "23", "e": "24", "f": "34"}  # The two cups that trade places.
START_POLICY = Path(__file__).parent / "data" / "shell_game_start.pt"
MAX_LENGTH = 20


class ShellGame:
    """Games of four and of five swaps, equally many of each, split into three disjoint parts.

    Attributes:
        vocab: the characters; a token id is an index into it.
        eos_id: the id of ";", which ends a completion.
        max_new_tokens: the longest chain, EOS included: all cups but the last are shown, then comes the answer.
        train: the problems that any training may see.
        validation: 50 sequences of swaps of each length, each with the ball under every cup, for choosing settings.
        held_out: as many, that are only ever reported.
        example: a training problem that is in the first batch of each run.

    The parts are split by sequence of swaps: who knows where three of the four balls end up knows it of the fourth, too. So
    where "3bace" is held out, "1bace" is not trained on either.

    Args:
        swaps: the numbers of swaps. Prompts of different lengths exercise padding and masks.

    Raises:
        ValueError: `swaps` is empty, or holds something else than 2, 3, 4, 5 and 6.

    >>> task = ShellGame()
    >>> task.example
    Problem(prompt='3bace', answer='4')
    >>> task.verify(">1>2>2=4;", "4"), task.verify("=4;", "4"), task.verify(">4=1;", "4"), task.verify("=1=4;", "4")
    (1.0, 1.0, 0.0, 0.0)
    """

    vocab = CUPS + "".join(SWAPS) + ">=;"
    eos_id = vocab.index(";")

    def __init__(self, swaps: Sequence[int] = (4, 5)):
        if not swaps or not set(swaps) <= {2, 3, 4, 5, 6}:
            raise ValueError(f"swaps must be some of 2, 3, 4, 5 and 6, got {swaps!r}: with one there is no step to show")
        self.max_new_tokens = 2 * max(swaps) + 1
        self.example = _problem("3", "bacefd"[: min(swaps)])
        self.train, self.validation, self.held_out = [], [], []
        rng = random.Random(0)  # The split is part of the task: one fixed split, whatever the seed of the run.
        count = len(SWAPS) ** min(swaps)
        size = min(50, count // 10)
        for number in sorted(set(swaps)):
            games = rng.sample(["".join(letters) for letters in product(SWAPS, repeat=number)], count)
            games.sort(key=self.example.prompt[1:].__eq__)  # Stable: the example goes last, to training.
            parts = games[:size], games[size : 2 * size], games[2 * size :]
            for part, chosen in zip((self.held_out, self.validation, self.train), parts):
                part += [_problem(cup, letters) for letters in chosen for cup in CUPS]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; a ValueError names characters outside the vocabulary."""
        unknown = sorted(set(text) - set(self.vocab))
        if unknown:
            raise ValueError(f"{text!r} has characters outside the vocabulary {self.vocab!r}: {unknown}")
        return [self.vocab.index(character) for character in text]

    def decode(self, ids) -> str:
        """The text of token ids, up to and including the first EOS."""
        text = "".join(self.vocab[int(i)] for i in ids)
        answer, eos, _ = text.partition(";")
        return answer + eos

    def verify(self, completion: str, answer: str) -> float:
        """The reward: 1.0 if there is one answer, "=" and a cup and the EOS at the end, and it is right; else 0.0.

        What stands before the answer is not read: nothing pays for length, or for steps that are right.
        """
        return float(completion.count("=") == 1 and completion.endswith(f"={answer};"))


def follow(prompt: str) -> str:
    """The cup that hides the ball after each swap.

    >>> follow("3bace")
    '1224'
    """
    cup, cups = prompt[0], ""
    for letter in prompt[1:]:
        first, second = SWAPS[letter]
        cup = {first: second, second: first}.get(cup, cup)
        cups += cup
    return cups


def _problem(cup: str, letters: str) -> Problem:
    return Problem(cup + letters, follow(cup + letters)[-1])


def demonstration(problem: Problem, steps: int) -> str:
    """A completion that shows the cup after each of the first `steps` swaps, then gives the answer. All of it is true.

    Raises:
        ValueError: `steps` is negative, or leaves no swap for the answer.

    >>> [demonstration(Problem("3bace", "4"), steps) for steps in (0, 1, 3)]
    ['=4;', '>1=4;', '>1>2>2=4;']
    """
    cups = follow(problem.prompt)
    if not 0 <= steps < len(cups):
        raise ValueError(f"steps must lie between 0 and {len(cups) - 1} for {problem.prompt!r}, got {steps}")
    return "".join(f">{cup}" for cup in cups[:steps]) + f"={cups[-1]};"


def full_chain(problem: Problem) -> str:
    """The demonstration that shows every cup: nowhere is there more than one swap to do at a time.

    >>> full_chain(Problem("3bace", "4"))
    '>1>2>2=4;'
    """
    return demonstration(problem, len(problem.prompt) - 2)


def steps_shown(completion: str) -> int:
    """How many cups a completion shows before its answer, right or wrong.

    >>> [steps_shown(completion) for completion in ("=4;", ">1>2=4;")]
    [0, 2]
    """
    return completion.count(">")


def demonstration_weights(swaps: int) -> list[float]:
    """How often a demonstration shows 0, 1, … swaps − 1 cups: mostly none, seldom all, and evenly what lies between.

    >>> demonstration_weights(4)
    [0.6, 0.15, 0.15, 0.1]
    """
    between = swaps - 2
    return [0.6, *[0.3 / max(between, 1)] * between, 0.1]


def fine_tune(task: ShellGame, seed: int = 0, steps: int = 500, batch_size: int = 64, learning_rate: float = 2e-3) -> TinyGPT:
    """Teach a fresh TinyGPT demonstrations that mostly answer directly and seldom show all steps.

    Args:
        task: its validation and held-out problems are never used.
        seed: of the weights, the demonstrations and the batches.
        steps: gradient steps.
        batch_size: demonstrations in a step, drawn with repetition.
        learning_rate: of AdamW with betas 0.9 and 0.99.
    """
    generator = torch.Generator().manual_seed(seed)
    policy = init_weights(TinyGPT(len(task.vocab), max_length=MAX_LENGTH), generator, std=0.1)  # 0.02 does not learn it.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.99), fused=True)
    prompt_ids, prompt_mask = encode_prompts(task, task.train, "cpu")
    completion_ids = encode_demonstrations(task, generator)
    for _ in range(steps):
        rows = torch.randint(len(task.train), (batch_size,), generator=generator)
        mask = None if prompt_mask is None else prompt_mask[rows]
        log_probs = token_log_probs(policy, prompt_ids[rows], completion_ids[rows], prompt_mask=mask)
        loss = -aggregate(log_probs, through_eos(completion_ids[rows], task.eos_id))  # Cross-entropy: mean over all tokens.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def encode_demonstrations(task: ShellGame, generator: torch.Generator) -> Tensor:
    """(problems, T) a demonstration of each training problem, filled up with EOS."""
    rows = []
    for problem in task.train:
        weights = torch.tensor(demonstration_weights(len(problem.prompt) - 1))
        steps = torch.multinomial(weights, 1, generator=generator).item()
        rows.append(task.encode(demonstration(problem, steps)))
    return torch.tensor([row + [task.eos_id] * (task.max_new_tokens - len(row)) for row in rows])


def shell_game_start(path: Path | str = START_POLICY) -> TinyGPT:
    """The shipped start policy: `fine_tune(ShellGame(), seed=0)`. It mostly answers directly, and then it guesses.

    Args:
        path: another file that `warm_start.save_policy` wrote.

    Raises:
        CheckpointError: the file is missing, damaged, or not a TinyGPT for `ShellGame`.
    """
    return load_policy(path, ShellGame, MAX_LENGTH)
