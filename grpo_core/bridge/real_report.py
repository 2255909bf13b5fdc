"""What a run of `python -m grpo_core real` shows: a group to read, a figure, scalars, and whether the model got better.

The same problems are answered before and after training. That is a paired comparison, and it can tell a change from luck
where two separate intervals still overlap.
"""

import importlib.util
import math
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from grpo_core.advantages import flat_groups, group_advantages
from grpo_core.bridge.text_task import TextTask
from grpo_core.config import GRPOConfig
from grpo_core.evaluate import mean_estimate
from grpo_core.report import BLUE, GRAY, ORANGE
from grpo_core.rollout import Rollout


@contextmanager
def scalars(folder: Path):
    """A function that logs a row of the history to TensorBoard, or does nothing where that is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writers = []

    def log(row: dict) -> None:
        if not writers:  # What an earlier run logged from this iteration on is void.
            writers.append(SummaryWriter(folder, purge_step=row["iteration"]))
        for name in row.keys() - {"iteration"}:
            writers[0].add_scalar(name, row[name], row["iteration"])
        writers[0].flush()

    try:
        yield log
    finally:
        for writer in writers:
            writer.close()


def group_page(rollout: Rollout, task: TextTask, config: GRPOConfig) -> str:
    """A group as a page to read: the prompt as the model sees it, each completion with reward and advantage.

    The first group is taken in which completions differ in reward, for in others nothing is learned.
    """
    group = int((~flat_groups(rollout.rewards)).int().argmax())
    rewards, size, problem = rollout.rewards[group].cpu(), rollout.group_size, rollout.problems[group]
    advantages = group_advantages(rewards[None], config.scale, config.std_eps, config.correction)[0].tolist()
    page = [
        f"A group of iteration 1, seed {config.seed}, sampled at temperature {config.temperature:g}.",
        f"True answer: {problem.answer}",
        f"--- prompt\n{task.tokenizer.decode(task.encode(problem.prompt))}",
    ]
    texts = rollout.texts[group * size : (group + 1) * size]
    for number, (text, reward, advantage) in enumerate(zip(texts, rewards.tolist(), advantages), start=1):
        signed = f"{advantage:+.3f}".replace("-", "−")
        page.append(f"--- completion {number}: reward {reward:g}, advantage {signed}\n{text}")
    return "\n\n".join(page) + "\n"


def describe_change(before: Sequence[float], after: Sequence[float]) -> str:
    """Two measurements on the same problems: their difference with its interval, and what chance alone would do.

    >>> print(describe_change([0, 0, 0, 1], [1, 1, 0, 1]))
    Of the same 4 problems, 2 became right and 0 became wrong: accuracy +0.500 [−0.419, +1.419].
    Coin throws would split so unevenly in 50 % of runs: this may be chance. Measure on more problems, or train longer.
    """
    differences = [b - a for a, b in zip(before, after)]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    mean, chance = mean_estimate(differences), sign_test(better, worse)
    interval = f"{mean.value:+.3f} [{mean.low:+.3f}, {mean.high:+.3f}]".replace("-", "−")
    return (
        f"Of the same {len(before)} problems, {better} became right and {worse} became wrong: accuracy {interval}.\n"
        f"Coin throws would split so unevenly in {100 * chance:.3g} % of runs: "
        + ("that is more than chance. " if chance < 0.05 else "this may be chance. ")
        + ("Another seed would still give another number." if chance < 0.05 else "Measure on more problems, or train longer.")
    )


def sign_test(better: int, worse: int) -> float:
    """Chance that a fair coin splits better + worse throws at least as unevenly, to either side.

    Source: McNemar 1947, in its exact form.

    >>> sign_test(8, 2), sign_test(0, 0)
    (0.109375, 1.0)
    """
    throws = better + worse
    return min(1.0, 2 * sum(math.comb(throws, k) for k in range(min(better, worse) + 1)) / 2**throws)


def learning_figure(frame: pd.DataFrame, title: str) -> Figure:
    """Rewards while training beside greedy accuracy with its 95 % band; length of the completions; KL where measured."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    iteration, measured = frame["iteration"], frame.dropna(subset=["accuracy"])
    left.plot(iteration, frame["reward"], color=GRAY, linewidth=1, label="reward while training")
    left.plot("iteration", "accuracy", "o-", data=measured, color=BLUE, markersize=4, label="greedy accuracy, 95 % band")
    left.fill_between("iteration", "accuracy_low", "accuracy_high", data=measured, color=BLUE, alpha=0.2, linewidth=0)
    left.legend(frameon=False)
    middle.plot(iteration, frame["completion_length"], color=ORANGE)
    right.plot(iteration, frame["kl"], color=ORANGE)
    for axes, name in zip((left, middle, right), (title, "Tokens in a completion", "KL to the start policy (nats per token)")):
        axes.set(xlabel="iteration", title=name)
        axes.set_ylim(0, 1 if axes is left else 1.1 * axes.get_ylim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    return figure
