"""GRPO on the small Llama and its word problems: does it learn, over several seeds? And what do stale samples cost?

A stale sample comes from the policy of some iterations ago, as where one machine samples while another trains. Left out: the
engines and networks that make samples stale in the first place.
"""

import copy
import hashlib
import statistics
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import torch

from grpo_core.bridge.causal_lm import CausalLM, eos_ids
from grpo_core.bridge.text_task import TextTask
from grpo_core.bridge.tiny import FOLDER as TINY_LLAMA
from grpo_core.bridge.tiny import MAX_NEW_TOKENS, tiny_start
from grpo_core.bridge.word_problems import word_problem_splits
from grpo_core.config import GRPOConfig
from grpo_core.evaluate import greedy_accuracy, mean_estimate, pass_at_k
from grpo_core.grpo import begin, grpo_update, sample_iteration, train
from grpo_core.report import write_text
from grpo_core.studies.runs import run_all, write_settings

FOLDER, SEEDS = Path("outputs/real_models"), range(3)
MODULES = (
    "grpo_core.grpo", "grpo_core.bridge.causal_lm", "grpo_core.bridge.text_task", "grpo_core.bridge.word_problems",
    "grpo_core.bridge.tiny",
)  # fmt: skip
# Temperature and learning rate were tried on validation problems; the rest are defaults.
CONFIG = GRPOConfig(temperature=1.0, iterations=20, learning_rate=5e-4, max_new_tokens=MAX_NEW_TOKENS, evaluate_every=5)
LAGS = (0, 2, 4, 8)
K = 8


def start() -> tuple[CausalLM, TextTask]:
    """The shipped small Llama as a policy, and its task."""
    model, tokenizer = tiny_start()
    task = TextTask(tokenizer, word_problem_splits(), eos_ids(model, tokenizer), CONFIG.max_new_tokens)
    return CausalLM(model, rows_at_once=512), task


def learn(seed: int) -> pd.DataFrame:
    """The history of a run, and pass@8 before it, at the temperature of its samples, with an interval over problems."""
    policy, task = start()
    generator = torch.Generator().manual_seed(seed)
    chance = pass_at_k(policy, task, task.held_out, K, K, CONFIG.temperature, generator)
    frame = train(task, policy, replace(CONFIG, seed=seed)).frame.drop(columns="seconds")
    return frame.assign(seed=seed, **{f"pass_at_{K}": float(chance)})


def train_stale(seed: int, lag: int) -> dict[str, float]:
    """A run whose samples come from the policy of `lag` iterations ago: clip fraction and KL of its second half, and what it
    reaches. The ratio is that of each token to the policy that sampled it, so the clip sees all of the lag."""
    policy, task = start()
    reference, optimizer, _ = begin(policy, CONFIG)
    generator = torch.Generator().manual_seed(seed)
    past, rows = deque([copy.deepcopy(policy)], maxlen=lag + 1), []
    for iteration in range(1, CONFIG.iterations + 1):
        rollout = sample_iteration(past[0], task, CONFIG, generator, iteration)
        rows.append(grpo_update(policy, reference, optimizer, rollout, CONFIG))
        past.append(copy.deepcopy(policy))
    late = rows[len(rows) // 2 :]
    clip_fraction = statistics.fmean(row["clip_fraction"] for row in late)
    accuracy = greedy_accuracy(policy, task, task.held_out)
    return {"lag": lag, "seed": seed, "clip_fraction": clip_fraction, "kl": rows[-1]["kl"], "accuracy": float(accuracy)}


def write(folder: Path, seeds: range) -> str:
    """Run all, write the tables, and return a summary."""
    histories = pd.concat(run_all(learn, [(seed,) for seed in seeds]))
    stale = pd.DataFrame(run_all(train_stale, [(seed, lag) for lag in LAGS for seed in seeds]))
    for name, frame in {"history": histories, "stale": stale}.items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    settings = {"config": asdict(CONFIG), "seeds": list(seeds), "lags": LAGS, "tiny_llama": model_version()}
    write_settings(folder, settings, *MODULES)
    return summary(histories, stale)


def model_version() -> str:
    """A fingerprint of the shipped model and its tokenizer."""
    digest = hashlib.sha256()
    for name in ("model.safetensors", "tokenizer.json"):
        digest.update((TINY_LLAMA / name).read_bytes())
    return digest.hexdigest()[:12]


def summary(histories: pd.DataFrame, stale: pd.DataFrame) -> str:
    accuracy = histories.dropna(subset=["accuracy"]).pivot_table(index="iteration", columns="seed", values="accuracy")
    lines = [f"iteration {i:>3}: greedy accuracy {mean_estimate(row.tolist())}" for i, row in accuracy.iterrows()]
    gain = mean_estimate((accuracy.iloc[-1] - accuracy.iloc[0]).tolist())
    lines.append(f"gain {gain}; pass@{K} of the start {histories[f'pass_at_{K}'].mean():.3f}")
    for lag, runs in stale.groupby("lag"):
        numbers = [mean_estimate(runs[name].tolist()) for name in ("clip_fraction", "accuracy")]
        lines.append("samples {} iterations old: clip fraction {}, accuracy {}".format(lag, *numbers))
    return "\n".join(lines)
