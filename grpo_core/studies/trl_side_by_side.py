"""The small Llama through TRL's trainer and through ours: one step, whole runs, time and memory; then TRL's defaults.

One step on the same completions must leave the same weights. Whole runs sample for themselves, so there only means over seeds
can be compared. Time is taken in turns, an iteration of TRL's and one of ours. Left out: GPUs, engines that only sample.
"""

import copy
import dataclasses
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from grpo_core.bridge.causal_lm import CausalLM, eos_ids
from grpo_core.bridge.text_task import TextTask
from grpo_core.bridge.tiny import MAX_NEW_TOKENS, tiny_start
from grpo_core.bridge.trl_run import dataset, make_trainer
from grpo_core.bridge.word_problems import word_problem_splits
from grpo_core.config import GRPOConfig
from grpo_core.evaluate import Estimate, greedy_accuracy, mean_estimate
from grpo_core.grpo import aggregate, begin, grpo_update, sample_iteration, score
from grpo_core.kl import kl_estimate
from grpo_core.report import BLUE, GRAY, ORANGE, write_figure, write_text
from grpo_core.rollout import Rollout, sample_groups
from grpo_core.studies.runs import run_all, write_settings

FOLDER, SEEDS = Path("outputs/trl_side_by_side"), range(3)
MODULES = ("grpo_core.grpo", "grpo_core.bridge.trl_run", "grpo_core.bridge.tiny", "grpo_core.bridge.word_problems")
CONFIG = GRPOConfig(
    prompts_per_iteration=24, temperature=1.0, learning_rate=5e-4, correction=1, max_new_tokens=MAX_NEW_TOKENS
)  # Else our defaults.
PAPER = dataclasses.replace(CONFIG, aggregation="sequence", beta=0.04, inner_epochs=1)  # As DeepSeekMath did.


@dataclass(frozen=True)
class Change:
    """One change to PAPER, in our words, or in TRL's where we have none.

    Attributes:
        ours: fields of our `GRPOConfig`.
        trl: arguments of TRL's.
    """

    ours: dict = field(default_factory=dict)
    trl: dict = field(default_factory=dict)

    @property
    def config(self) -> GRPOConfig:
        return dataclasses.replace(PAPER, **self.ours)


CHANGES = {
    "the paper": Change(),
    "loss_type dapo": Change({"aggregation": "token"}),
    "loss_type dr_grpo": Change({"aggregation": "constant"}),
    "beta 0": Change({"beta": 0.0}),
    "beta 0.08": Change({"beta": 0.08}),
    "scale_rewards none": Change({"scale": "none"}),
    "num_iterations 2": Change({"inner_epochs": 2}),
    "population std": Change({"correction": 0}),
    "use_bias_correction_kl": Change(trl={"use_bias_correction_kl": True}),
    "TRL's defaults": Change({"aggregation": "token", "beta": 0.0}),
}


# One step


class Step(NamedTuple):
    """What gradient steps on one rollout made of a model, in TRL's trainer and in `grpo_update`.

    Attributes:
        distance: the largest difference between a weight there and here.
        moved: the largest change of a weight here.
        metrics: a row for each metric, with columns TRL and grpo_core.
        models: TRL's and ours, after the step.
    """

    distance: float
    moved: float
    metrics: pd.DataFrame
    models: tuple[nn.Module, nn.Module]


def one_step_each(
    model: nn.Module, task: TextTask, rollout: Rollout, config: GRPOConfig, reference: nn.Module | None = None, **changes
) -> Step:
    """Train on the same completions with TRL's trainer and with `grpo_update`, and compare the weights.

    Both take steps of plain SGD: a step is then the gradient itself. AdamW divides each gradient by its own size, and so
    blows up what rounding does to gradients near 0.

    Args:
        model: a model of Hugging Face; it stays as it is.
        rollout: completions that it has sampled.
        config: all settings; one rollout, so `iterations` and `prompts_per_iteration` do not matter.
        reference: of the leash; the model itself by default.
        changes: arguments of TRL's `GRPOConfig` that replace those of `trl_settings`.
    """
    reference = model if reference is None else reference
    theirs, log = trl_step(model, reference, task, rollout, config, **changes)
    ours, metrics = our_step(model, reference, rollout, config)
    mean = pd.DataFrame(log).mean()
    trl = {"loss": mean["loss"], "clip_fraction": mean["clip_ratio/region_mean"], "grad_norm": mean["grad_norm"]}
    trl |= {"kl": log[0].get("kl", float("nan")), "reward": log[0]["reward"]}
    metrics |= {"reward": rollout.rewards.mean().item()}
    table = pd.DataFrame({"TRL": trl, "grpo_core": {name: metrics.get(name) for name in trl}})
    return Step(distance(theirs, ours), distance(model, ours), table, (theirs, ours))


def trl_step(model, reference, task: TextTask, rollout: Rollout, config: GRPOConfig, **changes) -> tuple[nn.Module, list[dict]]:
    """TRL's model after its steps on the rollout, and its log of them."""
    config = dataclasses.replace(
        config, prompts_per_iteration=len(rollout.problems), group_size=rollout.group_size, iterations=1,
        temperature=rollout.temperature,
    )  # fmt: skip
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        parts = {"train_dataset": dataset(task, rollout.problems), "rollout_func": handing_out(rollout)}
        once = {"shuffle_dataset": False, "logging_steps": 1, "optim": "sgd"}
        trainer = make_trainer(folder, task, config, folder, parts, **once | changes)
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(reference.state_dict())
        trainer.train()
    return trainer.model, [row for row in trainer.state.log_history if "loss" in row]


def handing_out(rollout: Rollout) -> Callable:
    """A rollout_func for TRL: it samples nothing, and hands out these completions."""
    real = torch.ones_like(rollout.prompt_ids, dtype=torch.bool) if rollout.prompt_mask is None else rollout.prompt_mask
    prompts = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, real)]
    completions = [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]
    unused = [[0.0] * len(ids) for ids in completions]  # Log-probs of the sampler; TRL reads those of vLLM only.
    return lambda *_: {"prompt_ids": prompts, "completion_ids": completions, "logprobs": unused}


def our_step(model, reference, rollout: Rollout, config: GRPOConfig) -> tuple[nn.Module, dict]:
    policy, frozen = CausalLM(copy.deepcopy(model)), CausalLM(copy.deepcopy(reference)).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=config.learning_rate)
    metrics = grpo_update(policy, frozen, optimizer, rollout, config)
    return policy.model, metrics


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two weights."""
    weights = other.state_dict()
    return max((weight - weights[name]).abs().max().item() for name, weight in one.state_dict().items())


def quiet() -> None:
    """No advice and no bars: what is printed should be the results."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", module="trl|transformers|torch.utils.data")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# Whole runs


def start() -> tuple[nn.Module, TextTask]:
    """The small Llama and its task."""
    quiet()
    model, tokenizer = tiny_start()
    return model, TextTask(tokenizer, word_problem_splits(), eos_ids(model, tokenizer), CONFIG.max_new_tokens)


def our_iterations(policy: CausalLM, task: TextTask, config: GRPOConfig) -> Iterator[dict]:
    """`train` without its measurements: mean reward and milliseconds of each iteration."""
    reference, optimizer, _ = begin(policy, config)
    leash = reference if config.beta > 0 else None
    generator = torch.Generator().manual_seed(config.seed)
    for iteration in range(1, config.iterations + 1):
        began = time.perf_counter()
        rollout = sample_iteration(policy, task, config, generator, iteration)
        grpo_update(policy, leash, optimizer, rollout, config)
        milliseconds = 1000 * (time.perf_counter() - began)
        yield {"iteration": iteration, "reward": rollout.rewards.mean().item(), "milliseconds": milliseconds}


class Laps(TrainerCallback):
    """Times TRL's iterations, each up to its last gradient step; between two of them it lets ours run one."""

    def __init__(self, gradient_steps: int, between: Callable[[], None]):
        self.gradient_steps, self.between, self.milliseconds = gradient_steps, between, []

    def on_train_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.gradient_steps == 0:
            self.milliseconds.append(1000 * (time.perf_counter() - self.began))
            self.between()
            self.began = time.perf_counter()


def run_trl(
    model: nn.Module, task: TextTask, config: GRPOConfig, between: Callable[[], None] = lambda: None, **changes
) -> tuple[nn.Module, list[dict]]:
    """A run of TRL's trainer; `between` is called after each iteration. Returns the model and a row for each iteration."""
    quiet()
    laps = Laps(config.inner_epochs, between)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        trainer = make_trainer(folder, task, config, folder, {"callbacks": [laps]}, **changes)
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "loss" in row]
    rows = [{"iteration": i, "reward": x, "milliseconds": y} for i, (x, y) in enumerate(zip(rewards, laps.milliseconds), 1)]
    return trainer.model, rows


def race(seed: int) -> list[dict]:
    """One seed through both trainers, in turns: a row for each side and iteration; on the last, greedy accuracy, too."""
    model, task = start()
    config = dataclasses.replace(CONFIG, seed=seed)
    policy, rows = CausalLM(copy.deepcopy(model)), []
    ours = our_iterations(policy, task, config)
    theirs, trl_rows = run_trl(model, task, config, lambda: rows.append(next(ours)))
    before = greedy_accuracy(CausalLM(model), task, task.held_out).value
    results = []
    for side, trained, run in (("TRL", CausalLM(theirs), trl_rows), ("grpo_core", policy, rows)):
        run = [{"iteration": 0, "accuracy": before}, *run]
        run[-1] |= {"accuracy": greedy_accuracy(trained, task, task.held_out).value}
        results += [{"side": side, "seed": seed} | row for row in run]
    return results


def megabytes(side: str) -> dict:
    """Peak memory of a process with the model loaded, and after three iterations."""
    import resource  # Not on Windows.

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts kilobytes.

    model, task = start()
    loaded, config = peak(), dataclasses.replace(CONFIG, iterations=3)
    if side == "TRL":
        run_trl(model, task, config)
    else:
        list(our_iterations(CausalLM(model), task, config))
    return {"side": side, "loaded": loaded, "peak": peak()}


# TRL's defaults against the paper's, one change at a time


def gradients() -> pd.DataFrame:
    """What each change does to the gradient on one and the same batch, sampled by a policy that has left its start.

    Columns: loss; norm of the gradient, as a multiple of the paper's; cosine with the paper's gradient; clip_fraction.
    With two steps, the gradient is that of the second one, on completions that are then a step old.
    """
    model, task = start()
    policy = CausalLM(copy.deepcopy(model))
    list(our_iterations(policy, task, dataclasses.replace(PAPER, iterations=10)))
    generator = torch.Generator().manual_seed(0)
    problems = task.train[: CONFIG.prompts_per_iteration]
    rollout = sample_groups(policy, task, problems, CONFIG.group_size, CONFIG.temperature, generator=generator)
    rows, found = [], {}
    for name, change in CHANGES.items():
        config = dataclasses.replace(change.config, learning_rate=0.01, max_grad_norm=1e9)
        after, metrics = step_of(policy.model, model, task, rollout, config, change)
        found[name] = moved(policy.model, after) / config.learning_rate
        if config.inner_epochs == 2:
            found[name] = found[name] - found["the paper"]
        paper = found["the paper"]
        cosine = torch.cosine_similarity(found[name], paper, dim=0).item()
        rows.append({"change": name, "norm": (found[name].norm() / paper.norm()).item(), "cosine": cosine} | metrics)
    return pd.DataFrame(rows)


def step_of(model, reference, task, rollout, config: GRPOConfig, change: Change) -> tuple[nn.Module, dict]:
    """By TRL's trainer, but for what it cannot be set to."""
    if config.correction == 0:
        after, metrics = our_step(model, reference, rollout, config)
        return after, {"loss": metrics["loss"], "clip_fraction": metrics["clip_fraction"], "by": "grpo_core"}
    after, log = trl_step(model, reference, task, rollout, config, **change.trl)
    return after, {"loss": log[-1]["loss"], "clip_fraction": log[-1]["clip_ratio/region_mean"], "by": "TRL"}


def moved(before: nn.Module, after: nn.Module) -> Tensor:
    """By how much each parameter fell, as one vector: the gradient, times the step size of SGD."""
    pairs = zip(before.parameters(), after.parameters())
    return torch.cat([(one - other).detach().double().flatten() for one, other in pairs])


def play(name: str, seed: int) -> dict:
    """A run with a change: reward of the last five iterations, greedy accuracy, KL and length on held-out problems."""
    model, task = start()
    change = CHANGES[name]
    config = dataclasses.replace(change.config, seed=seed)
    if change.trl:
        trained, rows = run_trl(model, task, config, **change.trl)
        policy = CausalLM(trained)
    else:
        policy = CausalLM(copy.deepcopy(model))
        rows = list(our_iterations(policy, task, config))
    generator = torch.Generator().manual_seed(seed)
    rollout = sample_groups(policy, task, task.held_out[:64], 4, config.temperature, generator=generator)
    with torch.no_grad():
        kl = kl_estimate(rollout.old_log_probs, score(CausalLM(model), rollout, slice(None)), "k3")
    return {
        "change": name,
        "seed": seed,
        "reward": sum(row["reward"] for row in rows[-5:]) / 5,
        "accuracy": greedy_accuracy(policy, task, task.held_out).value,
        "kl": aggregate(kl, rollout.completion_mask).item(),
        "length": rollout.completion_mask.sum(dim=1).float().mean().item(),
    }


def differences(runs: pd.DataFrame, column: str) -> dict[str, Estimate]:
    """How much more each change ends with than the paper's settings: mean of the differences of each seed, with interval."""
    table = runs.pivot(index="seed", columns="change", values=column)
    return {name: mean_estimate((table[name] - table["the paper"]).tolist()) for name in CHANGES if name != "the paper"}


def summarize(gradients: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each change: the gradient on one batch; the means after short runs, and how they differ from the paper's."""
    frame = gradients.set_index("change")
    for column in ("accuracy", "reward", "kl", "length"):
        frame[column] = runs.groupby("change")[column].mean()
        found = differences(runs, column)
        parts = {name: estimate.columns(f"minus_{column}") for name, estimate in found.items()}
        frame = frame.join(pd.DataFrame.from_dict(parts, orient="index"))
    return frame.reset_index()


def sides(curves: pd.DataFrame, memory: list[dict]) -> pd.DataFrame:
    """One row for each side: accuracy before and after, reward of the last five iterations, time and memory.

    times_ours is the median over pairs of iterations that stood side by side, for a busy machine slows down both alike.
    """
    last = curves[curves["iteration"] > curves["iteration"].max() - 5]
    times = curves.pivot(index=["seed", "iteration"], columns="side", values="milliseconds")
    rows = []
    for need in memory:
        run = curves[curves["side"] == need["side"]]
        accuracy = run.dropna(subset=["accuracy"]).groupby("seed")["accuracy"]
        reward = last[last["side"] == need["side"]].groupby("seed")["reward"].mean()
        row = need | {"before": accuracy.first().mean()} | mean_estimate(accuracy.last().tolist()).columns("accuracy")
        row |= mean_estimate(reward.tolist()).columns("reward")
        quarters = run["milliseconds"].quantile([0.25, 0.5, 0.75]).tolist()
        row |= dict(zip(("milliseconds_low", "milliseconds", "milliseconds_high"), quarters))
        rows.append(row | {"times_ours": (times[need["side"]] / times["grpo_core"]).median()})
    return pd.DataFrame(rows)


def curves_figure(curves: pd.DataFrame) -> Figure:
    """Mean reward over iterations of both sides: a thin line for each seed, a thick one for their mean."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for side, color, line in (("TRL", ORANGE, "--"), ("grpo_core", BLUE, "-")):
        runs = curves[curves["side"] == side].pivot(index="iteration", columns="seed", values="reward").dropna()
        axes.plot(runs.index, runs, line, color=color, linewidth=0.8, alpha=0.4)
        axes.plot(runs.index, runs.mean(axis=1), line, color=color, linewidth=2.5, label=side)
    title = f"The same settings in two trainers: {curves['seed'].nunique()} seeds each, and their mean"
    axes.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1), title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def changes_figure(summary: pd.DataFrame) -> Figure:
    """What each change does: to the direction of the gradient on one batch, and to greedy accuracy after a short run."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = summary[summary["change"] != "the paper"]
    left.barh(rows["change"], rows["cosine"], color=GRAY)
    left.set(xlabel="cosine with the paper's gradient", xlim=(min(0, rows["cosine"].min()), 1.02))
    left.invert_yaxis()
    right.axvline(0, color=GRAY, linewidth=1)
    right.hlines(rows["change"], rows["minus_accuracy_low"], rows["minus_accuracy_high"], color=BLUE, linewidth=2)
    right.plot(rows["minus_accuracy"], rows["change"], "o", color=BLUE)
    right.set(xlabel="accuracy minus the paper's, 95 % interval")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write(folder: Path, seeds: range) -> str:
    """Make all runs; write curves.csv, sides.csv, runs.csv, changes.csv and two figures into `folder`; return the tables."""
    memory = [run_all(megabytes, [(side,)], processes=1)[0] for side in ("TRL", "grpo_core")]  # Each in a fresh process.
    curves = pd.DataFrame([row for rows in run_all(race, [(seed,) for seed in seeds]) for row in rows])
    order = sorted(CHANGES, key=lambda name: not CHANGES[name].trl)  # TRL's runs take longest.
    runs = pd.DataFrame(run_all(play, [(name, seed) for name in order for seed in seeds]))
    tables = {"curves": curves, "runs": runs, "sides": sides(curves, memory)}
    tables["changes"] = summarize(run_all(gradients, [()])[0], runs)
    for name, frame in tables.items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    write_figure(folder / "curves.png", curves_figure(curves))
    write_figure(folder / "changes.png", changes_figure(tables["changes"]))
    settings = {"config": dataclasses.asdict(CONFIG), "paper": dataclasses.asdict(PAPER), "seeds": list(seeds)}
    settings |= {"changes": {name: dataclasses.asdict(change) for name, change in CHANGES.items()}}
    settings |= {"versions": {name: version(name) for name in ("trl", "transformers", "torch")}}
    write_settings(folder, settings, *MODULES)
    return "\n\n".join(tables[name].round(3).to_string(index=False) for name in ("sides", "changes"))
