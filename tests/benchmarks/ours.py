"""One iteration of `grpo_core` at its default settings, and where its time goes."""

import copy
import functools
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch

from grpo_core import Addition, GRPOConfig, TinyGPT, greedy_accuracy, grpo, grpo_update, rollout, sample_groups


class Stopwatch:
    """Adds up the milliseconds spent inside of functions that it replaces by timed ones."""

    def __init__(self):
        self.milliseconds = Counter()

    def timed(self, function: Callable, name: str | Callable[[], str]) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            label = name if isinstance(name, str) else name()
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.milliseconds[label] += 1000 * (time.perf_counter() - start)

        return call


class Ours:
    """The parts of `grpo_core.train`, so that each iteration can be timed on its own."""

    def __init__(self, policy: TinyGPT):
        self.config, self.task, self.policy = GRPOConfig(), Addition(), policy
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.config.learning_rate, weight_decay=0.0, fused=True)
        self.random, self.generator = random.Random(0), torch.Generator().manual_seed(0)

    def iteration(self) -> None:
        config = self.config
        problems = self.random.sample(self.task.train, config.prompts_per_iteration)
        samples = sample_groups(
            self.policy, self.task, problems, config.group_size, config.temperature, config.max_new_tokens, self.generator
        )
        grpo_update(self.policy, self.reference, self.optimizer, samples, config)

    def evaluation(self) -> None:
        greedy_accuracy(self.policy, self.task, self.task.held_out)

    def time_once(self) -> dict[str, float]:
        """Milliseconds of one iteration, of its pieces, and of an evaluation."""
        watch = Stopwatch()
        with ExitStack() as patches:
            for owner, function, name in self.pieces():
                patches.enter_context(patch.object(owner, function, watch.timed(getattr(owner, function), name)))
            watch.timed(self.iteration, "iteration")()
        watch.timed(self.evaluation, "evaluation")()
        times = dict(watch.milliseconds)
        times["with evaluation"] = times["iteration"] + times.pop("evaluation")
        times["verifier, texts, the rest"] = times["iteration"] - sum(times[name] for name in PIECES[:-1])
        return times

    def pieces(self) -> list[tuple]:
        """Owner and name of each timed function, and the piece that its time belongs to."""

        def scoring() -> str:
            return "forward" if torch.is_grad_enabled() else "reference"

        return [
            (rollout, "generate", "sampling"),
            (rollout, "token_log_probs", "old log-probs"),
            (grpo, "token_log_probs", scoring),
            (grpo, "grpo_loss", "loss"),
            (torch.Tensor, "backward", "backward"),
            (torch.nn.utils, "clip_grad_norm_", "gradient norm and optimizer"),
            (self.optimizer, "step", "gradient norm and optimizer"),
        ]


PIECES = [
    "sampling", "old log-probs", "reference", "forward", "loss", "backward", "gradient norm and optimizer",
    "verifier, texts, the rest",
]  # fmt: skip
