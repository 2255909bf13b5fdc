"""The command line: `python -m grpo_core` trains the start policy and writes what happened into outputs/.

With a word after it, it does something else: see COMMANDS. Started by torchrun, several processes train one policy.
"""

import dataclasses
import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

from grpo_core import processes
from grpo_core.checkpoint import CheckpointError, check_same_settings
from grpo_core.config import GRPOConfig, check_fit
from grpo_core.evaluate import greedy_accuracy
from grpo_core.grpo import train
from grpo_core.history import History, TrainingDiverged
from grpo_core.provenance import code_version, start_policies
from grpo_core.report import group_example, summary_table, write_json, write_report, write_text
from grpo_core.task import Addition
from grpo_core.warm_start import RECIPE, fine_tune, save_policy, warm_start


@dataclass(frozen=True)
class Run:
    """Train the start policy with GRPO; write figures, tables and a worked group.

    Other commands, each with its own --help: `python -m grpo_core warm-start` rebuilds the start policy; `sweep`,
    `scoreboard`, `baselines`, `shopping-list`, `growing-reasoning` and `no-leash` make what notebooks 06 to 08 show. `real`
    trains a model of Hugging Face on word problems, `tiny-llama` makes a small one.
    """

    # The settings of GRPO.
    config: Annotated[GRPOConfig, tyro.conf.arg(name="")] = field(default_factory=GRPOConfig)
    # How many runs, with seeds SEED, SEED + 1, …; figures and tables then show their mean.
    seeds: int = 1
    # Folder for the results.
    output: Path = Path("outputs")
    # Continue the interrupted run in that folder, with its settings.
    resume: bool = False

    def checkpoint(self, seed: int) -> Path:
        return self.output / "checkpoints" / f"seed{seed}.pt"


@dataclass(frozen=True)
class WarmStart:
    """Rebuild the start policy: fine-tune a fresh TinyGPT on true answers, and stop early."""

    # File for the weights.
    output: Path = Path("outputs/start_policy.pt")
    # Gradient steps.
    steps: int = RECIPE["steps"]
    # Of the weights and the batches.
    seed: int = RECIPE["seed"]


@dataclass(frozen=True)
class TinyLlama:
    """Rebuild the small Llama: train its tokenizer, fine-tune it on generated word problems, and stop early."""

    # Folder for model and tokenizer.
    output: Path = Path("outputs/tiny_llama")


@dataclass(frozen=True)
class Study:
    """Many runs, compared; tables and figures go into a folder."""

    # Folder for the results.
    output: Path
    # How many runs of each kind, with seeds SEED, SEED + 1, ….
    seeds: int
    # The first seed.
    seed: int


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)  # Two are slower for a model this small.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # A console that has no × shows a ? instead.
    try:
        with processes.joined():
            if arguments and arguments[0] in COMMANDS:
                COMMANDS[arguments[0]](*arguments)
            else:
                run(parse(arguments))
    except (ValueError, CheckpointError, FloatingPointError, OSError, processes.ProcessLost) as error:
        sys.exit(f"error: {error}")


def parse(arguments: list[str]) -> Run:
    """The settings of the command line; with --resume, those of the saved run where the command line is silent."""
    settings = tyro.cli(Run, prog="python -m grpo_core", args=arguments)
    if not settings.resume:
        return settings
    path = settings.output / "settings.json"
    saved = read_settings(path)
    settings = tyro.cli(Run, prog="python -m grpo_core", args=arguments, default=saved)
    check_same_settings(path, dataclasses.asdict(saved.config), dataclasses.asdict(settings.config))
    if settings.seeds < saved.seeds:
        raise CheckpointError(f"{path} is of a run with {saved.seeds} seeds: on --resume there can only be more")
    return settings


def read_settings(path: Path) -> Run:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return Run(GRPOConfig(**saved["config"]), int(saved["seeds"]))
    except FileNotFoundError:
        raise CheckpointError(f"there is no run to resume: {path} is missing. Start without --resume") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or of another version ({error}). Start without --resume") from error


def run(settings: Run) -> None:
    """Train once for each seed and write the results, also when it was stopped or went wrong."""
    config = settings.config
    prepare(settings)
    if processes.rank() == 0:
        print(announce(settings))
    histories: dict[int, History] = {}
    diverged = False
    try:
        for seed in range(config.seed, config.seed + settings.seeds):
            histories[seed] = train_seed(settings, dataclasses.replace(config, seed=seed))
            if len(histories[seed].rows) <= config.iterations:
                break
    except TrainingDiverged as error:
        histories[seed], diverged = error.history, True
        raise
    finally:
        if any(history.rows for history in histories.values()) and processes.rank() == 0:
            print(conclude(settings, histories, diverged))


def prepare(settings: Run) -> None:
    """Check all that can be checked beforehand, then make the folder ready."""
    if settings.seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {settings.seeds}")
    check_fit(settings.config, Addition(), warm_start())
    if processes.rank() > 0:
        return
    checkpoints = settings.checkpoint(0).parent
    checkpoints.mkdir(parents=True, exist_ok=True)
    if not settings.resume:
        for old in [*checkpoints.glob("seed*.pt"), *checkpoints.glob(".seed*.pt.*")]:  # Also what a kill left half-written.
            old.unlink()
    write_json(
        settings.output / "settings.json",
        {
            "code": code_version("grpo_core.grpo", "grpo_core.warm_start"),
            "config": dataclasses.asdict(settings.config),
            "seeds": settings.seeds,
            "start_policies": start_policies(),
        },
    )


def train_seed(settings: Run, config: GRPOConfig) -> History:
    """One run with its progress bar; the worked group is written as soon as it is sampled."""
    task, checkpoint = Addition(), settings.checkpoint(config.seed)
    resume = settings.resume and checkpoint.exists()  # A run may be stopped before its first checkpoint.
    first = processes.rank() == 0
    with tqdm(total=config.iterations, unit="iteration", desc=f"seed {config.seed}", disable=not first) as bar:

        def show(row, rollout):
            if row["iteration"] == 1 and config.seed == settings.config.seed and first:
                heading = f"A group of iteration 1, seed {config.seed}, sampled at temperature {config.temperature:g}.\n\n"
                write_text(settings.output / "group_example.txt", heading + group_example(rollout, config))
            bar.n = row["iteration"]
            shown = {"reward": row.get("reward"), "accuracy": row.get("accuracy"), "KL": row.get("kl")}
            bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items() if value is not None})

        history = train(task, warm_start(), config, on_iteration=show, checkpoint=checkpoint, resume=resume)
        bar.n = len(history.rows) - 1
        return history


def announce(settings: Run) -> str:
    """What is about to happen, before it does."""
    config, last = settings.config, settings.config.seed + settings.seeds - 1
    seeds = f"seed {config.seed}" if settings.seeds == 1 else f"seeds {config.seed} to {last}"
    return (
        f"Training the start policy with GRPO on two-digit sums, {seeds}.\n"
        f"{config.iterations} iterations: sample {config.prompts_per_iteration} prompts × {config.group_size} completions, "
        f"take {config.inner_epochs} gradient step{'s' if config.inner_epochs > 1 else ''}, measure greedy accuracy.\n"
        f"Results go to {settings.output}. Ctrl-C stops, --resume continues.\n"
    )


def conclude(settings: Run, histories: dict[int, History], diverged: bool) -> str:
    """Write the report; say what came out, where it is, and how to read it."""
    table = summary_table(write_report(histories, settings.output))
    files = "\n".join(str(path) for path in sorted(settings.output.iterdir()) if path.suffix in (".png", ".txt", ".csv"))
    rows = sum(len(history.rows) for history in histories.values())
    if diverged:
        advice = "The run went wrong, and would again: start a new one with other settings."
    elif rows < settings.seeds * (settings.config.iterations + 1):
        advice = f"Stopped early. To continue: python -m grpo_core --output {settings.output} --resume"
    else:
        advice = "Read an accuracy together with its interval: where two intervals overlap widely, the two may be the same."
    return f"\n{table}\n\n{files}\n\n{advice}"


def rebuild(name: str, *arguments: str) -> None:
    """`warm-start`: fine-tune and save a start policy."""
    check_alone(name)
    settings = tyro.cli(WarmStart, prog=f"python -m grpo_core {name}", args=arguments)
    task = Addition()
    print(f"Fine-tuning a fresh TinyGPT for {settings.steps} steps on {len(task.train)} sums …")
    policy = fine_tune(task, **RECIPE | {"steps": settings.steps, "seed": settings.seed})
    save_policy(policy, settings.output)
    print(f"greedy accuracy on validation sums {greedy_accuracy(policy, task, task.validation)}\n{settings.output}")


def study(name: str, *arguments: str) -> None:
    """A module of `grpo_core.studies` by its name: its `write(folder, seeds)` with the folder and seeds asked for."""
    check_alone(name)
    module = optional(f"grpo_core.studies.{name.replace('-', '_')}")
    default = Study(module.FOLDER, len(module.SEEDS), module.SEEDS[0])
    settings = tyro.cli(Study, prog=f"python -m grpo_core {name}", description=module.__doc__, args=arguments, default=default)
    if settings.seeds < 2:
        raise ValueError(f"seeds must be at least 2, got {settings.seeds}: one run has no interval")
    print(module.write(settings.output, range(settings.seed, settings.seed + settings.seeds)))
    print(settings.output)


def real(name: str, *arguments: str) -> None:
    """`real`: train a model of Hugging Face."""
    optional("grpo_core.bridge.real").main(name, *arguments)


def tiny_llama(name: str, *arguments: str) -> None:
    """`tiny-llama`: rebuild the small half-taught Llama, a model for `real` that needs no download."""
    check_alone(name)
    tiny = optional("grpo_core.bridge.tiny")
    settings = tyro.cli(TinyLlama, prog=f"python -m grpo_core {name}", args=arguments)
    print(tiny.rebuild(settings.output))
    print(settings.output)


def optional(module: str):
    """A module that may need more than the core does."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f'this needs further packages ({error.name} is missing): pip install -e ".[real]"') from error


def check_alone(name: str) -> None:
    if processes.count() > 1:
        raise ValueError(f"{name} runs in one process: start it without torchrun")


STUDIES = (
    "sweep",
    "scoreboard",
    "baselines",
    "shopping-list",
    "growing-reasoning",
    "no-leash",
    "real-models",
    "trl-side-by-side",
)
COMMANDS = {"warm-start": rebuild, "real": real, "tiny-llama": tiny_llama, **dict.fromkeys(STUDIES, study)}


if __name__ == "__main__":
    main(sys.argv[1:])
