"""Growing reasoning: GRPO on the shell game, with controls. When does it show more steps, why, and what stops it?

Each run is measured on held-out problems, by sampling, at the temperature and the length limit of its training. (The greedy
policy would jump: its answers change all at once, when the likeliest first token turns from "=" to ">".) The start policy
and the training both change with the seed. Left out: other tasks.
"""

import copy
import dataclasses
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from grpo_core.config import GRPOConfig
from grpo_core.evaluate import Estimate, mean_estimate, proportion
from grpo_core.grpo import grpo_update, sample_iteration, train
from grpo_core.report import BLUE, GRAY, ORANGE, over_seeds, write_figure, write_json, write_text
from grpo_core.rollout import Rollout, sample_groups
from grpo_core.shell_game import START_POLICY, ShellGame, fine_tune, follow, shell_game_start, steps_shown
from grpo_core.studies.runs import run_all, write_settings
from grpo_core.task import Problem
from grpo_core.warm_start import save_policy

FOLDER, SEEDS = Path("outputs/growing_reasoning"), range(3)
CONFIG = GRPOConfig(temperature=1.0, beta=0.04, iterations=40, evaluate_every=40, max_new_tokens=ShellGame().max_new_tokens)
RECORDED = ShellGame().held_out[-1]  # The problem that the recording shows, of five swaps.
EVERY = 2  # Iterations from one measurement to the next.
LEAST = 0.8  # Share of its full chains that a start policy must get right.


class CoinFlips(ShellGame):
    """The shell game with a verifier that reads nothing: it pays at random, about as often as the start policy is right."""

    def __init__(self, seed: int, rate: float = 0.36):
        super().__init__()
        self.rate, self.rng = rate, random.Random(seed)

    def verify(self, completion: str, answer: str) -> float:
        return float(self.rng.random() < self.rate)


def train_without_cut(task, policy, config: GRPOConfig, on_iteration: Callable[[dict, Rollout | None], None]) -> None:
    """As `train`, but completions that were cut off are taken out of the loss. They still count in their group's mean.

    Source: Yu et al. 2025, DAPO, overlong filtering; in TRL `mask_truncated_completions`.
    """
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(config.seed)
    on_iteration({"iteration": 0}, None)
    for iteration in range(1, config.iterations + 1):
        rollout = sample_iteration(policy, task, config, generator, iteration)
        ended = (rollout.completion_ids == task.eos_id).any(dim=1, keepdim=True)
        rollout.completion_mask = rollout.completion_mask & ended
        grpo_update(policy, reference, optimizer, rollout, config)
        on_iteration({"iteration": iteration}, rollout)


@dataclass(frozen=True)
class Variant:
    """A kind of run.

    Attributes:
        changes: what differs from CONFIG.
        task: makes the task that the run is trained on, from the seed.
        train: the training loop.
    """

    changes: dict = field(default_factory=dict)
    task: Callable[[int], ShellGame] = lambda seed: ShellGame()
    train: Callable = train


DEFAULT, RANDOM = "default", "random reward"
VARIANTS = {
    DEFAULT: Variant(),
    RANDOM: Variant(task=CoinFlips),
    "beta 0": Variant({"beta": 0.0}),
    "beta 1": Variant({"beta": 1.0}),
    "sequence": Variant({"aggregation": "sequence"}),
    "constant": Variant({"aggregation": "constant"}),
    "9 tokens": Variant({"max_new_tokens": 9}),
    "7 tokens": Variant({"max_new_tokens": 7}),
    "7 tokens, cut left out": Variant({"max_new_tokens": 7}, train=train_without_cut),
}

REPEATED = (DEFAULT, "sequence")


def completions(rollout: Rollout) -> pd.DataFrame:
    """One row for each completion of a rollout.

    Columns: swaps of its problem; steps, the cups it shows; left, the swaps that are left for the answer to do (1 in a full
    chain); right; length in tokens; ended, with an EOS.
    """
    swaps = [len(follow(problem.prompt)) for problem in rollout.problems for _ in range(rollout.group_size)]
    frame = pd.DataFrame({"swaps": swaps, "steps": [steps_shown(text) for text in rollout.texts]})
    return frame.assign(
        left=frame["swaps"] - frame["steps"],
        right=rollout.rewards.flatten().tolist(),
        length=rollout.completion_mask.sum(dim=1).tolist(),
        ended=[text.endswith(";") for text in rollout.texts],
    )


def measure(policy, max_new_tokens: int = CONFIG.max_new_tokens, problems: list[Problem] | None = None) -> pd.DataFrame:
    """Two completions of each held-out problem (or of others), always with the same dice, and the true verifier."""
    task, generator = ShellGame(), torch.Generator().manual_seed(0)
    problems = task.held_out if problems is None else problems
    return completions(sample_groups(policy, task, problems, 2, CONFIG.temperature, max_new_tokens, generator))


def summarize(frame: pd.DataFrame) -> dict[str, float]:
    """Accuracy, also of each number of swaps; mean lengths; shares: cut off, full chains, chains with 0, 1, … 5 shown cups.

    A few chains show more than that.
    """
    right = frame["right"] == 1
    return {
        "accuracy": right.mean(),
        **{f"accuracy_{swaps}": right[frame["swaps"] == swaps].mean() for swaps in sorted(frame["swaps"].unique())},
        "length": frame["length"].mean(),
        "length_right": frame["length"][right].mean(),
        "length_wrong": frame["length"][~right].mean(),
        "unfinished": 1 - frame["ended"].mean(),
        "full": (frame["left"] == 1).mean(),
        **{f"share_{steps}": (frame["steps"] == steps).mean() for steps in range(6)},
    }


def start_policy(seed: int, folder: str) -> Path:
    """A file with the start policy of a seed: the shipped one for 0, else a new one, written into the folder.

    Raises:
        ValueError: it has not learned the full chain, so there is nothing that RL could bring out.
    """
    path = START_POLICY
    if seed != 0:
        path = Path(folder) / f"start{seed}.pt"
        save_policy(fine_tune(ShellGame(), seed), path)
    frame = measure(shell_game_start(path), problems=ShellGame().validation)
    accuracy = frame[frame["left"] == 1]["right"].mean()
    if not accuracy > LEAST:
        raise ValueError(f"the start policy of seed {seed} gets {accuracy:.2f} of its full chains right: take another seed")
    return path


def play(name: str, seed: int, start: Path) -> tuple[list[dict], list[dict], list[dict]]:
    """One run: the rows of history.csv, the rows of chains.csv, and the frames of the recording."""
    variant, policy = VARIANTS[name], shell_game_start(start)
    config = dataclasses.replace(CONFIG, **variant.changes, seed=seed)
    history, chains, frames = [], [], []

    def watch(row, rollout):
        iteration = row["iteration"]
        if iteration % EVERY:
            return
        run = {"run": name, "seed": seed, "iteration": iteration}
        frame = measure(policy, config.max_new_tokens)
        history.append(run | summarize(frame))
        if name == DEFAULT or iteration in (0, config.iterations):
            counts = frame.groupby(["swaps", "steps"])["right"].agg(completions="size", right="sum")
            chains.extend(run | counts for counts in counts.reset_index().to_dict("records"))
        if name == DEFAULT:
            frames.append(record(policy, iteration, frame))

    variant.train(variant.task(seed), policy, config, watch)
    return history, chains, frames


def record(policy, iteration: int, frame: pd.DataFrame) -> dict:
    """A frame of the recording: eight completions of one problem, always with the same dice, and the state of the run.

    The last of the lengths, 5, holds longer chains, too. They are rare, and leave nothing to answer.
    """
    dice = torch.Generator().manual_seed(1)
    group = sample_groups(policy, ShellGame(), [RECORDED], 8, CONFIG.temperature, CONFIG.max_new_tokens, dice)
    return {
        "iteration": iteration,
        "prompt": RECORDED.prompt,
        "answer": RECORDED.answer,
        "texts": group.texts,
        "rewards": group.rewards.flatten().tolist(),
        "lengths": {str(steps): int((frame["steps"].clip(upper=5) == steps).sum()) for steps in range(6)},
        "accuracy": round(frame["right"].mean(), 4),
        "mean_length": round(frame["length"].mean(), 4),
    }


def last(history: pd.DataFrame, run: str, column: str) -> list[float]:
    """A column at the end of each seed's run."""
    return history[history["run"] == run].groupby("seed")[column].last().tolist()


def by_swaps_left(chains: pd.DataFrame, run: str = DEFAULT, iteration: int = 0) -> pd.DataFrame:
    """For each number of swaps that are left for the answer, all seeds together: completions, their share, their accuracy."""
    chosen = chains[(chains["run"] == run) & (chains["iteration"] == iteration)]
    chosen = chosen.assign(left=chosen["swaps"] - chosen["steps"]).query("left > 0")
    table = chosen.groupby("left")[["completions", "right"]].sum()
    share, accuracy = table["completions"] / table["completions"].sum(), table["right"] / table["completions"]
    return pd.DataFrame({"completions": table["completions"], "share": share, "accuracy": accuracy})


def markdown(history: pd.DataFrame) -> str:
    """Where each kind of run ends, mean over seeds with its 95 % interval."""
    lines = ["| run | accuracy | mean length | full chains | cut off |", "|---|---|---|---|---|"]
    start = history[(history["run"] == DEFAULT) & (history["iteration"] == 0)]
    rows = {"start": {column: start[column].tolist() for column in history}}
    rows |= {run: {column: last(history, run, column) for column in history} for run in history["run"].unique()}
    for name, row in rows.items():
        cells = [share(row["accuracy"]), mean_estimate(row["length"]), share(row["full"]), share(row["unfinished"])]
        lines.append("| " + " | ".join(map(str, [name, *cells])) + " |")
    return "\n".join(lines) + "\n"


def share(values: list[float]) -> Estimate:
    """The mean of shares; Student's interval does not know where a share ends."""
    mean = mean_estimate(values)
    return Estimate(mean.value, max(mean.low, 0.0), min(mean.high, 1.0))


STYLES = [(BLUE, "-"), (ORANGE, "--"), (GRAY, "-."), ("black", ":")]


def draw_curves(axes, history: pd.DataFrame, column: str, runs: list[str]) -> None:
    """A column over the iterations for some kinds of runs: mean over seeds with its 95 % band."""
    for run, (color, line) in zip(runs, STYLES):
        curve = over_seeds(history[history["run"] == run], column)
        axes.plot(curve.index, curve["value"], color=color, linestyle=line, linewidth=2, label=run)
        axes.fill_between(curve.index, curve["low"], curve["high"], color=color, alpha=0.2, linewidth=0)
    axes.set_xlabel("iteration")
    axes.legend(frameon=False, fontsize=8)


def draw_shares(axes, history: pd.DataFrame, run: str = DEFAULT) -> None:
    """How many completions show 0, 1, … 4 cups, over the iterations, as layers; mean over seeds."""
    shares = history[history["run"] == run].groupby("iteration")[[f"share_{steps}" for steps in range(5)]].mean()
    colors = [ORANGE, "#f0b98d", "#bcbcbc", "#7fb4d6", BLUE]
    layers = axes.stackplot(shares.index, shares.T, colors=colors, edgecolor="white", linewidth=0.5)
    names = ["no cup shown", "1", "2", "3: all of four swaps but one", "4: all of five swaps but one"]
    axes.legend(layers[::-1], names[::-1], fontsize=7, loc="upper right", framealpha=0.9)  # On the broadest layer.
    axes.set(xlabel="iteration", ylim=(0, 1), xlim=(0, shares.index.max()))


def draw_by_swaps_left(axes, chains: pd.DataFrame, iterations: tuple[int, int]) -> None:
    """Accuracy by the number of swaps that are left for the answer, before and after, with Wilson's 95 % intervals."""
    names = ("start policy", f"after {iterations[1]} iterations")
    for iteration, name, color, style, shift in zip(iterations, names, (ORANGE, BLUE), ("s--", "o-"), (-0.04, 0.04)):
        table = by_swaps_left(chains, iteration=iteration)
        right = (table["accuracy"] * table["completions"]).round().astype(int)
        intervals = [proportion(*pair) for pair in zip(right, table["completions"])]
        axes.plot(table.index + shift, table["accuracy"], style, color=color, label=name)
        axes.vlines(table.index + shift, [e.low for e in intervals], [e.high for e in intervals], color=color)
    axes.axhline(1 / 4, color=GRAY, linewidth=0.8, linestyle=":", label="guessing")
    axes.set(xlabel="swaps left for the answer", ylim=(0, 1.03), xticks=range(1, 6))
    axes.legend(frameon=False, fontsize=8)


def figure(history: pd.DataFrame, chains: pd.DataFrame) -> Figure:
    """Accuracy and length with two controls, shares of the chain lengths, accuracy by what is left for the answer."""
    picture = Figure(figsize=(9, 6.4), layout="constrained")
    panels = picture.subplots(2, 2)
    runs = [DEFAULT, RANDOM, "beta 1"]
    draw_curves(panels[0, 0], history, "accuracy", runs)
    draw_curves(panels[0, 1], history, "length", runs)
    draw_shares(panels[1, 0], history)
    draw_by_swaps_left(panels[1, 1], chains, (0, int(history["iteration"].max())))
    titles = ["accuracy of samples", "mean length in tokens", "shown cups, share of the samples", "accuracy by swaps left"]
    for axes, title in zip(panels.flat, titles):
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylim(0, 1.03)
    panels[0, 1].set_ylim(0, CONFIG.max_new_tokens)
    return picture


def write(folder: Path, seeds: range) -> str:
    """Make all runs; write history.csv, fresh.csv, chains.csv, recording.json, growing_reasoning.png and .md into `folder`.

    fresh.csv repeats two kinds of runs on as many further seeds: a question that came up while looking at history.csv is
    answered there.
    """
    fresh = range(seeds.stop, seeds.stop + len(seeds))
    with tempfile.TemporaryDirectory() as scratch:
        starts = dict(zip([*seeds, *fresh], run_all(start_policy, [(seed, scratch) for seed in [*seeds, *fresh]])))
        pairs = [(name, seed) for name in VARIANTS for seed in seeds] + [(name, seed) for name in REPEATED for seed in fresh]
        results = run_all(play, [(name, seed, starts[seed]) for name, seed in pairs])
    history, chains = (pd.DataFrame([row for result in results for row in result[i]]) for i in (0, 1))
    tables = {"history": history[history["seed"].isin(seeds)], "fresh": history[history["seed"].isin(fresh)]}
    tables["chains"] = chains[chains["seed"].isin(seeds)]
    for name, frame in tables.items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    write_json(folder / "recording.json", results[0][2])
    write_figure(folder / "growing_reasoning.png", figure(tables["history"], tables["chains"]))
    table = markdown(tables["history"])
    write_text(folder / "growing_reasoning.md", table)
    settings = {
        "seeds": list(seeds),
        "fresh": list(fresh),
        "every": EVERY,
        "least": LEAST,
        "config": dataclasses.asdict(CONFIG),
        "runs": {k: v.changes for k, v in VARIANTS.items()},
    }
    write_settings(folder, settings, "grpo_core.grpo", "grpo_core.shell_game")
    return table
