"""The command `python -m grpo_core real`: GRPO on a model of Hugging Face and on word problems, with a comparison at the end.

The same problems are answered before and after training, so that a change can be told from luck. Left out: engines that only
sample, sweeps over settings and several seeds; see the studies for those.
"""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pandas as pd
import torch
import torch.distributed as dist
import transformers
import tyro
from tqdm import tqdm

from grpo_core import processes
from grpo_core.bridge.causal_lm import CausalLM, eos_ids, load
from grpo_core.bridge.gsm8k import Splits, load_problems
from grpo_core.bridge.real_report import describe_change, group_page, learning_figure, scalars
from grpo_core.bridge.text_task import INSTRUCTION, TextTask
from grpo_core.bridge.word_problems import word_problem_splits
from grpo_core.checkpoint import CheckpointError, check_same_settings
from grpo_core.config import GRPOConfig, check_fit
from grpo_core.evaluate import greedy_completions
from grpo_core.grpo import train
from grpo_core.history import History, TrainingDiverged
from grpo_core.provenance import code_version
from grpo_core.report import combine, summary_table, write_figure, write_json, write_text
from grpo_core.rollout import Rollout
from grpo_core.task import Problem

CUDA = torch.cuda.is_available()


def default_config() -> GRPOConfig:
    """Settings for a model of half a billion weights: 200 small steps, as long a way as verl's examples go on GSM8K."""
    return GRPOConfig(
        prompts_per_iteration=8,
        temperature=1.0,
        iterations=100,
        learning_rate=2e-6,
        beta=0.001,
        max_new_tokens=384,
        micro_batch=4,
        evaluate_every=20,
        device="cuda" if CUDA else "cpu",
    )


@dataclass(frozen=True)
class RealRun:
    """Train a model of Hugging Face with GRPO on word problems whose answer is a number.

    It measures the model on held-out problems before and after, and says whether the change is larger than chance. Started
    by `torchrun --nproc-per-node=2 -m grpo_core real …`, two processes share the groups.
    """

    # A name on the Hugging Face hub, such as Qwen/Qwen2.5-0.5B-Instruct, or a folder with model and tokenizer.
    model: str
    # "gsm8k" from the hub, "word-problems" made by templates, a folder with train.jsonl and test.jsonl, or one .jsonl file.
    data: str = "gsm8k"
    # The settings of GRPO.
    config: Annotated[GRPOConfig, tyro.conf.arg(name="")] = field(default_factory=default_config)
    # Added to each question. Give "" to a model that was tuned to answer in this form.
    instruction: str = INSTRUCTION
    # Train a LoRA adapter of this rank; 0 trains all weights. An adapter wants a larger step: try a LEARNING_RATE of 2e-5.
    lora_rank: int = 0
    # Compute in bfloat16: for GPUs that can.
    bf16: bool = CUDA and torch.cuda.is_bf16_supported(including_emulation=False)
    # Compute activations twice to hold fewer of them: a third more time, much less memory.
    gradient_checkpointing: bool = False
    # Completions that are sampled at a time; fewer need less memory.
    rows_at_once: int = 64
    # Accuracy is measured on so many of the EVALUATE_ON problems, the same ones each time; 0 takes all.
    held_out_problems: int = 200
    # A checkpoint is written after every so many iterations. It has three times the size of the trained weights.
    checkpoint_every: int = 10
    # Folder for the results.
    output: Path = Path("outputs/real")
    # Continue the interrupted run in that folder, with its settings.
    resume: bool = False

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoints" / "real.pt"

    @property
    def trained(self) -> Path:
        return self.output / "model"


# What a resumed run must have in common with the saved one. The others save memory or disk; no result depends on them, but with
# other ROWS_AT_ONCE other random numbers are drawn.
DECISIVE = ("model", "data", "instruction", "lora_rank", "bf16", "held_out_problems")
AT_LEAST = {"lora_rank": 0, "rows_at_once": 1, "held_out_problems": 0, "checkpoint_every": 1}


def main(name: str, *arguments: str) -> None:
    """`real`: train, compare, write."""
    settings = parse(name, arguments)
    try:
        run(settings)
    except KeyboardInterrupt:  # Before or after training; `train` itself ends in order.
        sys.exit(f"Stopped. To continue: {go_on(settings)}" if processes.rank() == 0 else 1)


def parse(name: str, arguments: Sequence[str]) -> RealRun:
    """The settings of the command line; with --resume, those of the saved run where the command line is silent."""
    call = {"prog": f"python -m grpo_core {name}", "args": arguments}
    if "--resume" not in arguments:
        return tyro.cli(RealRun, **call)
    path = tyro.cli(RealRun, default=RealRun(model=""), **call).output / "settings.json"
    saved = read_settings(path)
    settings = tyro.cli(RealRun, default=saved, **call)
    check_same_settings(path, decisive(saved), decisive(settings))
    return settings


def decisive(settings: RealRun) -> dict:
    return dataclasses.asdict(settings.config) | {name: getattr(settings, name) for name in DECISIVE}


def read_settings(path: Path) -> RealRun:
    names = [f.name for f in dataclasses.fields(RealRun) if f.name not in ("config", "output", "resume")]
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return RealRun(config=GRPOConfig(**saved["config"]), **{name: saved[name] for name in names})
    except FileNotFoundError:
        raise CheckpointError(f"there is no run to resume: {path} is missing. Start without --resume") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or of another version ({error}). Start without --resume") from error


def run(settings: RealRun) -> None:
    """Measure, train, measure again; write the results, also when training was stopped or went wrong.

    A resumed run measures the start policy anew: that is the model as it was loaded.
    """
    config = settings.config
    problems = read_problems(settings)
    torch.manual_seed(config.seed)  # An adapter begins with random numbers.
    memory = {name: getattr(settings, name) for name in ("gradient_checkpointing", "rows_at_once")}
    leash = config.beta > 0 or settings.lora_rank > 0  # With an adapter, a reference costs no memory.
    policy, tokenizer = load(settings.model, settings.bf16, settings.lora_rank, leash=leash, **memory)
    task, left_out = make_task(settings, problems, policy, tokenizer)
    if sum(weight.numel() for weight in policy.parameters()) > 1e7:  # Small models are faster on one.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    prepare(settings)
    say(announce(settings, task, left_out))
    start = greedy_texts(policy.to(config.device), task, getattr(task, config.evaluate_on))
    history, change, diverged = History(), "", False
    try:
        history = train_visibly(settings, task, policy)
        if len(history.rows) > config.iterations:
            change = compare(settings, task, start, greedy_texts(policy, task, getattr(task, config.evaluate_on)))
            save_model(settings, policy, tokenizer)
    except TrainingDiverged as error:
        history, diverged = error.history, True
        raise
    finally:
        if history.rows and processes.rank() == 0:
            print(conclude(settings, history, change, diverged))


def say(text: str) -> None:
    if processes.rank() == 0:
        print(text, flush=True)


def go_on(settings: RealRun) -> str:
    return f"python -m grpo_core real --output {settings.output} --resume"


def read_problems(settings: RealRun) -> Splits:
    """The problems; what can be checked without the model is checked before."""
    config = settings.config
    for name, least in AT_LEAST.items():
        if getattr(settings, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(settings, name)}")
    if settings.trained.exists() and not settings.resume:
        raise ValueError(f"{settings.trained} is the model of an earlier run: give another --output, or remove it")
    problems = word_problem_splits() if settings.data == "word-problems" else load_problems(settings.data)
    check_fit(config, SimpleNamespace(train=problems.train, encode=str.split), policy=None)
    return problems._replace(
        validation=pick(problems.validation, settings.held_out_problems),
        held_out=pick(problems.held_out, settings.held_out_problems),
    )


def pick(problems: list[Problem], count: int) -> list[Problem]:
    """So many problems, always the same ones, from all over the list; 0 for all."""
    return random.Random(0).sample(problems, count) if 0 < count < len(problems) else problems


def make_task(settings: RealRun, problems: Splits, policy: CausalLM, tokenizer) -> tuple[TextTask, int]:
    """The task without the training problems that do not fit into the model's context, and how many those are.

    Raises:
        ValueError: a problem to measure on does not fit; without it, the accuracy would be another one.
    """
    config = settings.config
    task = TextTask(tokenizer, problems, eos_ids(policy.model, tokenizer), config.max_new_tokens, settings.instruction)

    def fits(problem: Problem) -> bool:
        return len(task.encode(problem.prompt)) + config.max_new_tokens <= policy.max_length

    task.train = [problem for problem in problems.train if fits(problem)]
    too_long = sum(not fits(problem) for problem in getattr(problems, config.evaluate_on))
    if too_long or len(task.train) < config.prompts_per_iteration:
        raise ValueError(
            f"max_new_tokens {config.max_new_tokens} is too large: {too_long} of the {config.evaluate_on} problems and "
            f"{len(problems.train) - len(task.train)} of the {len(problems.train)} training problems do not fit into the "
            f"{policy.max_length} tokens of this model's context with it"
        )
    return task, len(problems.train) - len(task.train)


def prepare(settings: RealRun) -> None:
    """Make the folder ready; a new run removes the checkpoint of an old one."""
    if processes.rank() > 0:
        return
    folder = settings.checkpoint.parent
    folder.mkdir(parents=True, exist_ok=True)
    if not settings.resume:
        for old in [*folder.glob("real.pt"), *folder.glob(".real.pt.*")]:  # Also what a kill left half-written.
            old.unlink()
    about = dataclasses.asdict(settings)
    del about["output"], about["resume"]
    code = code_version("grpo_core.grpo", "grpo_core.bridge.causal_lm", "grpo_core.bridge.text_task")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(settings.output / "settings.json", {"code": code, **about, "versions": versions})


def announce(settings: RealRun, task: TextTask, left_out: int) -> str:
    """What is about to happen, before it does."""
    config = settings.config
    short = f" {left_out} more are left out: their prompts are too long." if left_out else ""
    return (
        f"Training {settings.model} with GRPO on {len(task.train)} problems of {settings.data}, seed {config.seed}.{short}\n"
        f"{config.iterations} iterations: sample {config.prompts_per_iteration} prompts × {config.group_size} completions, "
        f"take {config.inner_epochs} gradient step{'s' if config.inner_epochs > 1 else ''}; greedy accuracy on "
        f"{len(getattr(task, config.evaluate_on))} {config.evaluate_on} problems before, after and every "
        f"{config.evaluate_every}.\nResults go to {settings.output}. Ctrl-C stops, --resume continues.\n"
    )


def greedy_texts(policy: CausalLM, task: TextTask, problems: list[Problem]) -> list[str]:
    """The greedy completion of each problem; several processes divide the problems between them."""
    own = processes.share(problems)
    return gather(greedy_completions(policy, task, own) if own else [])


def gather(own: list) -> list:
    """The lists of all processes, one after the other: `processes.share` undone."""
    if processes.count() == 1:
        return own
    lists = [None] * processes.count()
    with processes.peers():
        dist.all_gather_object(lists, own)
    return [item for items in lists for item in items]


def train_visibly(settings: RealRun, task: TextTask, policy: CausalLM) -> History:
    """The run with its progress bar. What is known of it is on disk after each iteration."""
    config, first = settings.config, processes.rank() == 0
    resume = settings.resume and settings.checkpoint.exists()  # A run may be stopped before its first checkpoint.
    written = settings.output / "history.csv"
    rows = pd.read_csv(written).to_dict("records") if resume and first and written.exists() else []
    bar = tqdm(total=config.iterations, unit="iteration", desc=f"seed {config.seed}", disable=not first)
    with bar, scalars(settings.output / "tensorboard") as log:

        def show(row: dict, rollout: Rollout | None) -> None:
            if not first:
                return
            rows[:] = [old for old in rows if old["iteration"] < row["iteration"]] + [row]  # Some come a second time.
            log(row)
            write_history(settings, History(rows))
            if row["iteration"] == 1:
                write_text(settings.output / "group_example.txt", group_page(rollout, task, config))
            bar.n = row["iteration"]
            shown = {"reward": row.get("reward"), "accuracy": row.get("accuracy"), "KL": row.get("kl")}
            bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items() if value is not None})

        saving = {"checkpoint": settings.checkpoint, "resume": resume, "checkpoint_every": settings.checkpoint_every}
        history = train(task, policy, config, on_iteration=show, **saving)
        bar.n = len(history.rows) - 1
        return history


def write_history(settings: RealRun, history: History) -> pd.DataFrame:
    frame = combine({settings.config.seed: history})
    write_text(settings.output / "history.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    return frame


def compare(settings: RealRun, task: TextTask, start: list[str], trained: list[str]) -> str:
    """Write what was answered before and after, problem by problem; say whether the change is larger than chance."""
    problems = getattr(task, settings.config.evaluate_on)
    rights = [[task.verify(text, problem.answer) for text, problem in zip(texts, problems)] for texts in (start, trained)]
    columns = zip(problems, start, trained, *rights)
    names = "question", "answer", "start", "trained", "start_reward", "trained_reward"
    lines = [json.dumps(dict(zip(names, (*problem, *rest))), ensure_ascii=False) for problem, *rest in columns]
    if processes.rank() == 0:
        write_text(settings.output / "completions.jsonl", "\n".join(lines) + "\n")
    return describe_change(*rights)


def save_model(settings: RealRun, policy: CausalLM, tokenizer) -> None:
    """The trained model, or its adapter, as a folder that `from_pretrained` and other programs read."""
    if processes.rank() == 0:
        for part in (policy.model, tokenizer):
            part.save_pretrained(settings.trained)


def conclude(settings: RealRun, history: History, change: str, diverged: bool) -> str:
    """Write history and figure; say what came out, where it is, and how to read it."""
    config, done = settings.config, history.rows[-1]["iteration"]
    frame = write_history(settings, history)
    write_figure(settings.output / "learning.png", learning_figure(frame, Path(settings.model).name))
    every = config.evaluate_every * max(1, config.iterations // config.evaluate_every // 10)
    names = sorted(path for path in settings.output.iterdir() if path.name not in ("checkpoints", "settings.json"))
    files = "\n".join(map(str, names))
    if diverged:
        advice = "The run went wrong, and would again: start a new one with other settings."
    elif done < config.iterations:
        advice = f"Stopped early. To continue from the last checkpoint: {go_on(settings)}"
    else:
        advice = change
    return f"\n{summary_table(frame, every)}\n\n{files}\n\n{advice}"
