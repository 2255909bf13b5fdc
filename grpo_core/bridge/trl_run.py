"""The same run in TRL, the library that most people train with: its `GRPOTrainer`, our settings, data and verifier.

Half of the settings only switch off what TRL does by default; `settings_table` has them all, with those of verl. Left out:
vLLM, LoRA, FSDP. Both libraries have them, and they change how a run is computed, not what.

    python -m grpo_core.bridge.trl_run --model FOLDER --data word-problems

Several processes are started by `accelerate launch` on GPUs; on CPUs it starts only one, and torchrun serves.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import trl
import tyro
from datasets import Dataset
from transformers import PrinterCallback

from grpo_core import processes
from grpo_core.bridge.causal_lm import CausalLM, eos_ids, load
from grpo_core.bridge.gsm8k import load_problems
from grpo_core.bridge.real import default_config
from grpo_core.bridge.text_task import INSTRUCTION, TextTask
from grpo_core.bridge.word_problems import word_problem_splits
from grpo_core.config import GRPOConfig
from grpo_core.evaluate import greedy_accuracy
from grpo_core.task import Problem

CONFIG = replace(default_config(), correction=1)  # That of `python -m grpo_core real`, with TRL's standard deviation.
LOSS_TYPE = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
LOSS_AGG_MODE = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}


def trl_settings(config: GRPOConfig, count: int = 1) -> dict:
    """Our settings as arguments of TRL's `GRPOConfig`, for so many processes.

    Raises:
        ValueError: TRL cannot be set to one of them.
    """
    fixed = ({"kl": "k3"} if config.beta > 0 else {}) | ({"correction": 1, "std_eps": 1e-4} if config.scale == "std" else {})
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} is always {value!r} in TRL: set it so in our config, or the two runs would differ")
    completions = config.prompts_per_iteration * config.group_size
    batch = config.micro_batch or completions // count
    if completions % (batch * count):
        raise ValueError(
            f"{count} × {batch}, the completions that TRL scores at a time, must divide {completions}, those of an iteration"
        )
    batches = completions // (batch * count)
    return {
        "num_generations": config.group_size, "per_device_train_batch_size": batch, "gradient_accumulation_steps": batches,
        "steps_per_generation": batches, "max_steps": config.iterations * config.inner_epochs,
        "num_iterations": config.inner_epochs, "temperature": config.temperature, "top_p": 1.0, "top_k": 0,
        "max_completion_length": config.max_new_tokens, "mask_truncated_completions": False,
        "scale_rewards": "group" if config.scale == "std" else "none", "epsilon": config.clip_eps,
        "epsilon_high": config.clip_eps_high, "beta": config.beta, "use_bias_correction_kl": False,
        "loss_type": LOSS_TYPE[config.aggregation], "optim": "adamw_torch_fused", "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.schedule, "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": config.max_grad_norm,
        "bf16": False, "gradient_checkpointing": False, "disable_dropout": True, "use_cpu": config.device == "cpu",
        "seed": config.seed,
    }  # fmt: skip


def verl_settings(config: GRPOConfig) -> dict:
    """The nearest arguments of `python -m verl.trainer.main_ppo`; ROWS says where they are not the same.

    Source: verl/trainer/config and verl/trainer/ppo/core_algos.py of github.com/verl-project/verl, commit 018f23b.
    """
    prompts, actor, rollout = config.prompts_per_iteration, "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    return {
        "algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": config.scale == "std",
        "data.train_batch_size": prompts, rollout + "n": config.group_size, actor + "ppo_mini_batch_size": prompts,
        actor + "ppo_micro_batch_size_per_gpu": config.micro_batch or prompts * config.group_size,
        "trainer.total_training_steps": config.iterations, actor + "ppo_epochs": config.inner_epochs,
        rollout + "temperature": config.temperature, rollout + "top_p": 1, rollout + "top_k": -1,
        "data.max_response_length": config.max_new_tokens, actor + "clip_ratio_low": config.clip_eps,
        actor + "clip_ratio_high": config.clip_eps if config.clip_eps_high is None else config.clip_eps_high,
        actor + "clip_ratio_c": 1e9, actor + "use_kl_loss": config.beta > 0, actor + "kl_loss_coef": config.beta,
        actor + "kl_loss_type": "low_var_kl", actor + "loss_agg_mode": LOSS_AGG_MODE[config.aggregation],
        actor + "loss_scale_factor": config.max_new_tokens, actor + "optim.lr": config.learning_rate,
        actor + "optim.lr_scheduler_type": "constant", actor + "optim.weight_decay": 0.0,
        actor + "grad_clip": config.max_grad_norm, "data.seed": config.seed,
    }  # fmt: skip


# How several processes are started on one machine.
START = (
    "processes", "torchrun --nnodes=1 --nproc-per-node=2 -m grpo_core real",
    "accelerate launch --num_machines=1 --num_processes=2 -m grpo_core.bridge.trl_run",
    "python -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=2",
    "on CPUs, accelerate launch starts one process only: torchrun does it for TRL, too. verl finds machines through Ray",
)  # fmt: skip
# What is set; the names of ours, of TRL's and of verl's settings; what remains unequal.
ROWS = (
    (
        "completions", "prompts_per_iteration group_size micro_batch",
        "num_generations per_device_train_batch_size gradient_accumulation_steps steps_per_generation",
        "train_batch_size n ppo_mini_batch_size ppo_micro_batch_size_per_gpu",
        "TRL counts the completions of one process. verl's older FSDP worker takes the mean of the means of micro-batches",
    ),
    (
        "steps", "iterations inner_epochs", "max_steps num_iterations", "total_training_steps ppo_epochs",
        "max_steps counts gradient steps, total_training_steps iterations",
    ),
    (
        "sampling", "temperature max_new_tokens", "temperature top_p top_k max_completion_length mask_truncated_completions",
        "temperature top_p top_k max_response_length", "verl samples with another engine and scores the samples again",
    ),
    (
        "advantage", "scale correction std_eps", "scale_rewards", "adv_estimator norm_adv_by_std_in_grpo",
        "both always divide by the sample standard deviation, plus 1e-4 in TRL and 1e-6 in verl. To AdamW, our correction=0 "
        "is the same as their beta times the square root of (group_size - 1) / group_size",
    ),
    (
        "clip", "clip_eps clip_eps_high", "epsilon epsilon_high", "clip_ratio_low clip_ratio_high clip_ratio_c",
        "verl's second clip, for A < 0 at a ratio of 3, has no switch; above e^20, where its ratios end, it never binds",
    ),
    (
        "leash", "beta kl", "beta use_bias_correction_kl", "use_kl_loss kl_loss_coef kl_loss_type",
        "TRL knows k3 only. verl cuts k3 off at 10, where it no longer pulls",
    ),
    ("mean of the loss", "aggregation", "loss_type", "loss_agg_mode loss_scale_factor", ""),
    (
        "optimizer", "learning_rate schedule max_grad_norm",
        "optim learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm",
        "lr lr_scheduler_type weight_decay grad_clip",
        "TRL's linear schedule falls at each gradient step, ours at each iteration; verl has none",
    ),
    (
        "numbers", "seed device", "seed use_cpu bf16 gradient_checkpointing disable_dropout", "seed",
        "no seed gives the same samples in two libraries",
    ),
)  # fmt: skip


def settings_table(config: GRPOConfig) -> pd.DataFrame:
    """What reproduces a run with these settings here, in TRL and in verl, a row for each thing that is set."""
    columns = {"grpo_core": asdict(config), "TRL + accelerate": trl_settings(config), "verl + Ray": verl_settings(config)}

    def cell(names: str, values: dict) -> str:
        """name=value of the settings with these names; verl's stand behind a path."""
        last = {name.rpartition(".")[2]: f"{name}={value}" for name, value in values.items()}
        return " ".join(last[name] for name in names.split())

    rows = [START, *([what, *map(cell, names, columns.values()), unequal] for what, *names, unequal in ROWS)]
    return pd.DataFrame(rows, columns=["what", *columns, "what remains unequal"])


def make_trainer(model: str | Path, task: TextTask, config: GRPOConfig, output: Path, parts=None, **changes) -> trl.GRPOTrainer:
    """TRL's trainer for a run with these settings.

    Args:
        model: name or folder. TRL loads the policy from there, and the reference.
        task: gives problems, prompts and rewards.
        output: a folder for what TRL writes.
        parts: further arguments of `trl.GRPOTrainer`, such as callbacks.
        changes: arguments of its `GRPOConfig` that replace those of `trl_settings`.
    """
    settings = trl_settings(config, int(os.environ.get("WORLD_SIZE", 1)))
    settings |= {"output_dir": str(output), "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    settings |= {"logging_steps": config.inner_epochs}  # A row of the log for each iteration.
    trainer = trl.GRPOTrainer(
        model=str(model),
        reward_funcs=verifier(task),
        args=trl.GRPOConfig(**settings | changes),
        processing_class=task.tokenizer,
        **{"train_dataset": dataset(task, task.train)} | (parts or {}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def dataset(task: TextTask, problems: Sequence[Problem]) -> Dataset:
    """The problems as TRL reads them. TRL applies the chat template, if there is one, and its prompts are `task.encode`'s."""
    chat = task.tokenizer.chat_template is not None
    texts = [f"{problem.prompt}\n{task.instruction}" if task.instruction else problem.prompt for problem in problems]
    prompts = [[{"role": "user", "content": text}] if chat else f"Question: {text}\nAnswer:" for text in texts]
    return Dataset.from_dict({"prompt": prompts, "answer": [problem.answer for problem in problems]})


def verifier(task: TextTask) -> Callable:
    """The task's verifier as TRL calls it. It reads token ids, since TRL's texts have lost their EOS."""

    def verify(completion_ids, answer, **_) -> list[float]:
        return [task.verify(task.decode(ids), truth) for ids, truth in zip(completion_ids, answer)]

    return verify


@dataclass(frozen=True)
class Run:
    """Train a model with TRL's GRPOTrainer, at the settings of this project."""

    # Name of a model, or its folder.
    model: str
    # "gsm8k" from the hub, "word-problems" made by templates, a folder with train.jsonl and test.jsonl, or one .jsonl file.
    data: str = "gsm8k"
    # Added to each question.
    instruction: str = INSTRUCTION
    # Folder for the trained model.
    output: Path = Path("outputs/trl_run")
    # The settings of GRPO.
    config: Annotated[GRPOConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: CONFIG)


def main(run: Run) -> None:
    """Train, save the model, and print its greedy accuracy on held-out problems, before and after."""
    start, tokenizer = load(run.model)
    end = eos_ids(start.model, tokenizer)
    del start  # The trainer loads its own.
    problems = word_problem_splits() if run.data == "word-problems" else load_problems(run.data)
    task = TextTask(tokenizer, problems, end, run.config.max_new_tokens, run.instruction)
    trainer = make_trainer(run.model, task, run.config, run.output)
    accuracies = [greedy_accuracy(CausalLM(trainer.model), task, task.held_out)]
    trainer.train()
    trainer.save_model()
    accuracies.append(greedy_accuracy(CausalLM(trainer.model), task, task.held_out))
    if processes.rank() == 0:
        print("greedy accuracy before {}, after {}".format(*accuracies), run.output, sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Run, prog="python -m grpo_core.bridge.trl_run"))
