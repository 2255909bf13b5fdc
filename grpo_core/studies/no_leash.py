"""What the leash is for: a grader that can be gamed, with leashes of five strengths; a learned reward; and an exact verifier.

Each run is measured by what training saw and by what is true, on problems that are never trained on. With the exact verifier,
three things are looked for that a leash may protect: the form of the answers, other problems, and the way back after a step
that was far too large.
"""

import copy
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from grpo_core.config import GRPOConfig
from grpo_core.evaluate import greedy_completions
from grpo_core.grpo import grpo_update, sample_iteration
from grpo_core.leash import completion_kl
from grpo_core.policy import TinyGPT
from grpo_core.report import BLUE, ORANGE, write_figure, write_json, write_text
from grpo_core.rivals.budget import Budget, adamw
from grpo_core.rivals.pairs import Pairs, make_pairs
from grpo_core.rivals.ppo import PPOConfig, train_ppo
from grpo_core.rivals.reward_model import pair_accuracy, standardize, train_reward_model
from grpo_core.rollout import sample_groups, through_eos
from grpo_core.sloppy_grader import HedgedAddition, exact_grader, fine_tune, guesses, sloppy_grader, sloppy_start
from grpo_core.studies.runs import run_all, write_settings
from grpo_core.task import Addition, Problem
from grpo_core.warm_start import warm_start

FOLDER, SEEDS = Path("outputs/no_leash"), range(3)
MODULES = ("grpo_core.grpo", "grpo_core.leash", "grpo_core.rivals.ppo", "grpo_core.sloppy_grader")  # What makes the numbers.
CONFIG = GRPOConfig(iterations=50, max_new_tokens=16)
BETAS = (0.0, 0.02, 0.08, 0.3, 1.0)
FEW_BETAS = (0.0, 0.08, 0.3)
RECORDED = ("24+48=", "76+58=", "31+19=")  # Prompts whose completions are kept, at every fifth iteration of the first seed.
BAD_UPDATE = {"iteration": 6, "times": 30}  # The learning rate of that iteration is so many times too high.
PPO_BUDGET, PAIR_BUDGET = Budget(iterations=60, gradient_steps=120), Budget(prompts_per_iteration=24)


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        experiment: "sloppy grader", "exact verifier", "bad update" (one with a learning rate that is far too high) or
            "large sums" (only those of 100 and more are trained on).
        beta: of the leash.
        seed: of training; the start policy has the same.
        iterations: of training.
    """

    experiment: str
    beta: float
    seed: int
    iterations: int = CONFIG.iterations

    def task(self) -> HedgedAddition:
        task = HedgedAddition(sloppy_grader if self.experiment == "sloppy grader" else exact_grader)
        if self.experiment == "large sums":
            task.train = [problem for problem in task.train if is_large(problem)]
            task.example = task.train[0]
        return task

    def measured_on(self) -> dict[str, list[Problem]]:
        """Held-out problems, by the name of their kind."""
        problems = HedgedAddition().held_out
        if self.experiment != "large sums":
            return {"all": problems}
        return {"large": list(filter(is_large, problems)), "small": [p for p in problems if not is_large(p)]}

    def learning_rate(self, iteration: int) -> float:
        bad = self.experiment == "bad update" and iteration == BAD_UPDATE["iteration"]
        return CONFIG.learning_rate * (BAD_UPDATE["times"] if bad else 1)


def is_large(problem: Problem) -> bool:
    return len(problem.answer) == 3


def jobs(seeds: Sequence[int]) -> list[Job]:
    """All runs with GRPO; the longest first."""
    sloppy = [Job("sloppy grader", beta, seed) for beta in BETAS for seed in seeds]
    exact = [Job("exact verifier", beta, seed) for beta in FEW_BETAS for seed in seeds]
    large = [Job("large sums", beta, seed) for beta in FEW_BETAS for seed in seeds]
    return sloppy + exact + large + [Job("bad update", beta, seed, 40) for beta in FEW_BETAS for seed in seeds]


def start_policy(seed: int) -> TinyGPT:
    """The shipped start policy for seed 0, for another seed one that is fine-tuned here."""
    return sloppy_start() if seed == 0 else fine_tune(seed)


def watch(job: Job, start: TinyGPT) -> tuple[list[dict], list[dict]]:
    """Train one run; returns its rows, one for each second iteration and kind of problems, and its recorded completions."""
    task, policy, reference = job.task(), copy.deepcopy(start), copy.deepcopy(start).requires_grad_(False)
    config = dataclasses.replace(CONFIG, beta=job.beta, seed=job.seed)
    optimizer, generator = adamw(policy, config.learning_rate), torch.Generator().manual_seed(job.seed)
    rows, recording, measured_on = [], [], job.measured_on()
    for iteration in range(job.iterations + 1):
        if iteration > 0:
            rollout = sample_iteration(policy, task, config, generator, iteration)
            optimizer.param_groups[0]["lr"] = job.learning_rate(iteration)
            grpo_update(policy, reference if config.beta > 0 else None, optimizer, rollout, config)
        for name, problems in measured_on.items() if iteration % 2 == 0 else ():
            about = {"experiment": job.experiment, "run": f"beta {job.beta:g}", "beta": job.beta, "seed": job.seed}
            about |= {"iteration": iteration, "measured_on": name}
            rows.append(about | measure(policy, reference, task, problems, config, iteration))
        if iteration % 5 == 0:
            recording += [{"iteration": iteration} | record(policy, task, prompt, config) for prompt in RECORDED]
    return rows, recording


def measure(policy, reference, task: HedgedAddition, problems: list[Problem], config: GRPOConfig, iteration: int) -> dict:
    """Both rewards, distance and form, on 8 samples for each of 48 problems; true greedy accuracy on all of them.

    seen, true: mean reward that the grader pays, and that it should pay. greedy: share of problems whose greedy completion is
    right. kl: nats from the reference for a whole completion. entropy: nats per token. guesses, length: means over
    completions. well_formed: share of completions that are one number and the EOS.
    """
    generator = torch.Generator().manual_seed(1000 * config.seed + iteration)
    rollout = sample_groups(policy, task, problems[:48], 8, config.temperature, generator=generator)
    answers, mask, count = answers_of(rollout), rollout.completion_mask, len(rollout.texts)
    greedy = zip(greedy_completions(policy, task, problems), problems)
    return {
        "seen": rollout.rewards.mean().item(),
        "true": sum(map(task.true_reward, rollout.texts, answers)) / count,
        "greedy": sum(task.true_reward(text, problem.answer) for text, problem in greedy) / len(problems),
        "kl": completion_kl(policy, reference, rollout).mean().item(),
        "entropy": -torch.where(mask, rollout.old_log_probs, 0.0).sum().item() / mask.sum().item(),
        "guesses": sum(len(guesses(text)) for text in rollout.texts) / count,
        "length": mask.sum().item() / count,
        "well_formed": sum(re.fullmatch(r"\d+;", text) is not None for text in rollout.texts) / count,
    }


def record(policy, task: HedgedAddition, prompt: str, config: GRPOConfig) -> dict:
    """Eight completions of a prompt, with what the grader pays and what is true."""
    problem = Problem(prompt, str(sum(map(int, prompt.removesuffix("=").split("+")))))
    generator = torch.Generator().manual_seed(config.seed)
    rollout = sample_groups(policy, task, [problem], 8, config.temperature, generator=generator)
    true = list(map(task.true_reward, rollout.texts, answers_of(rollout)))
    return problem._asdict() | {"texts": list(rollout.texts), "seen": rollout.rewards[0].tolist(), "true": true}


def answers_of(rollout) -> list[str]:
    """The true answer for each completion."""
    return [problem.answer for problem in rollout.problems for _ in range(rollout.group_size)]


def watch_reward_model(beta: float, seed: int) -> pd.DataFrame:
    """PPO from the start policy of `Addition`, against a reward model that is trained once and never again.

    Returns:
        The ledger's rows, and on the first and last of them truth_preferred: how often the reward model prefers the true
        answer to a wrong completion that the policy of that moment wrote to a held-out problem.
    """
    task, policy, generator = Addition(), warm_start(), torch.Generator().manual_seed(seed)
    rounds = range(1, PAIR_BUDGET.iterations + 1)
    pairs = make_pairs([sample_iteration(policy, task, PAIR_BUDGET, generator, i) for i in rounds])
    model = standardize(train_reward_model(policy, pairs, seed=seed), pairs)
    before = pair_accuracy(model, truth_against(policy, task, generator)).value
    budget, config = dataclasses.replace(PPO_BUDGET, seed=seed), PPOConfig(leash="reward", beta=beta)
    frame = train_ppo(task, policy, budget, config, model).frame
    after = pair_accuracy(model, truth_against(policy, task, generator)).value
    frame.insert(0, "iteration", range(len(frame)))
    return frame.assign(truth_preferred=[before, *[None] * (len(frame) - 2), after], beta=beta, seed=seed)


def truth_against(policy, task: Addition, generator: torch.Generator) -> Pairs:
    """The true answer and a wrong completion of the policy: a pair for each wrong one among 8 to each held-out problem."""
    rollout = sample_groups(policy, task, task.held_out, 8, PPO_BUDGET.temperature, generator=generator)
    rows = [task.encode(f"{answer};") for answer in answers_of(rollout)]
    true_ids = torch.tensor([row + [task.eos_id] * (task.max_new_tokens - len(row)) for row in rows])
    sides = true_ids, rollout.completion_ids, through_eos(true_ids, task.eos_id), rollout.completion_mask
    return Pairs(rollout.prompt_ids, *sides)[rollout.rewards.flatten() == 0]


def write(folder: Path = FOLDER, seeds: Sequence[int] = SEEDS) -> str:
    """Run everything; write three tables, the recording and the figure into `folder`; return the summary."""
    starts = dict(zip(seeds, run_all(start_policy, [(seed,) for seed in seeds])))
    runs = run_all(watch, [(job, starts[job.seed]) for job in jobs(seeds)])
    learned = pd.concat(run_all(watch_reward_model, [(beta, seed) for beta in FEW_BETAS for seed in seeds]))
    rows = pd.DataFrame([row for rows, _ in runs for row in rows])
    sloppy = rows["experiment"] == "sloppy grader"
    history = rows[sloppy].drop(columns=["experiment", "measured_on"])
    for name, frame in {"history": history, "verifier": rows[~sloppy], "reward_model": learned}.items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    first = [job.experiment == "sloppy grader" and job.seed == seeds[0] for job in jobs(seeds)]
    kept = {f"beta {job.beta:g}": run[1] for job, run, keep in zip(jobs(seeds), runs, first) if keep}
    write_json(folder / "recording.json", kept)
    write_figure(folder / "no_leash.png", goodhart_figure(history))
    settings = {"config": dataclasses.asdict(CONFIG), "ppo": dataclasses.asdict(PPO_BUDGET), "seeds": list(seeds)}
    settings |= {"betas": BETAS, "few_betas": FEW_BETAS, "bad_update": BAD_UPDATE, "pairs": dataclasses.asdict(PAIR_BUDGET)}
    write_settings(folder, settings, *MODULES)
    return summary(history)


def summary(history: pd.DataFrame) -> str:
    """The last iteration of each leash, mean over seeds."""
    last = history[history["iteration"] == history["iteration"].max()]
    return last.groupby("beta")[["seen", "true", "greedy", "kl", "guesses"]].mean().round(3).to_string()


def goodhart_figure(history: pd.DataFrame) -> Figure:
    """Both rewards against the distance from the start policy, one line for each leash."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    draw_goodhart(figure.add_subplot(), history)
    return figure


def draw_goodhart(axes, history: pd.DataFrame) -> None:
    """Mean over seeds; the last point of each line is marked, and named with its beta."""
    looks = (("seen", BLUE, "-", "o", "what the grader pays"), ("true", ORANGE, "--", "s", "what is true"))
    for column, color, line, marker, label in looks:
        for beta, run in history.groupby("beta"):
            curve = run.groupby("iteration")[["kl", column]].mean()
            plot = partial(axes.plot, color=color, linestyle=line, marker=marker, markersize=5, linewidth=1.2)
            plot(curve["kl"], curve[column], markevery=[len(curve) - 1], label=label if beta == 0 else None)
            end = curve.iloc[-1]
            axes.annotate(f"{beta:g}", (end["kl"], end[column]), (3, 4), textcoords="offset points", color=color, fontsize=8)
    axes.set(xlabel="KL to the start policy, nats per completion", ylabel="mean reward", ylim=(-0.02, 1), xlim=(-0.1, None))
    axes.set_title("A leash of each strength (numbers: beta), 50 iterations", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
