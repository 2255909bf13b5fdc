"""The same iteration in TRL's trainer, which owns its loop: its iterations are timed from a callback between them."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_core import Addition, GRPOConfig

from . import tiny_trl


def time_trl(rounds: int, threads: tuple[int, ...], between: Callable[[], None]) -> tuple[dict[int, list[float]], int]:
    """Milliseconds of `rounds` iterations for each number of threads; `between` runs, untimed, after each.

    Returns:
        The times for each number of threads, without the first round, and the number of the model's parameters.
    """
    tiny_trl.quiet_and_offline()
    from transformers import TrainerCallback

    config = GRPOConfig()
    times = defaultdict(list)

    class Laps(TrainerCallback):
        """A lap is an iteration: it ends with its last gradient step. Thread counts take turns."""

        def on_train_begin(self, *_, **__):
            self.start_lap(0)

        def start_lap(self, lap: int) -> None:
            self.threads = threads[lap % len(threads)]
            torch.set_num_threads(self.threads)
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % config.inner_epochs == 0:
                times[self.threads].append(1000 * (time.perf_counter() - self.start))
                torch.set_num_threads(1)
                between()
                self.start_lap(state.global_step // config.inner_epochs)

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_trl.random_gpt2()
        steps = (rounds + 1) * len(threads) * config.inner_epochs
        trainer = tiny_trl.make_trainer(model, Addition().train, Path(folder), callbacks=[Laps()], **same_work(config, steps))
        trainer.train()
    torch.set_num_threads(1)
    return {n: laps[1:] for n, laps in times.items()}, model.num_parameters()


def same_work(config: GRPOConfig, steps: int) -> dict:
    """Our settings in TRL's words."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": config.prompts_per_iteration * config.group_size,
        "num_generations": config.group_size,
        "num_iterations": config.inner_epochs,
        "max_completion_length": config.max_new_tokens,
        "temperature": config.temperature,
        "beta": config.beta,
        "epsilon": config.clip_eps,
        "learning_rate": config.learning_rate,
        "loss_type": "dapo",
    }
