"""The sweep behind the scoreboard: each method at several learning rates, on validation problems and seeds of their own.

Every method gets the same rates to try. The best one by the mean over seeds is what the scoreboard uses. DPO's beta was chosen
in the same way, with 40 gradient steps.
"""

from pathlib import Path

import pandas as pd

from grpo_core.report import write_text
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.dpo import DPOConfig, train_dpo
from grpo_core.studies.runs import run_all
from grpo_core.studies.scoreboard import METHODS, STEPS, play
from grpo_core.task import Addition
from grpo_core.warm_start import warm_start

FOLDER, SEEDS = Path("outputs/scoreboard"), range(100, 103)
RATES = (6.25e-6, 1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
BETAS = (0.1, 0.3, 1.0, 3.0, 10.0)


def sweep(seeds: range) -> pd.DataFrame:
    """Final validation accuracy of each method, number of gradient steps and learning rate, mean over seeds."""
    kinds = [(name, steps, rate) for steps in STEPS for name in METHODS for rate in RATES]
    jobs = [(name, steps, seed, rate) for name, steps, rate in kinds for seed in seeds]
    finals = [rows[-1]["accuracy"] for rows in run_all(play, jobs)]
    frame = pd.DataFrame([(*kind, len(seeds)) for kind in kinds], columns=["method", "steps", "learning_rate", "seeds"])
    frame["accuracy"] = [sum(finals[i : i + len(seeds)]) / len(seeds) for i in range(0, len(finals), len(seeds))]
    return frame


def sweep_beta(seeds: range) -> pd.DataFrame:
    """The same for DPO at several betas, each with three learning rates."""
    kinds = [(beta, rate) for beta in BETAS for rate in (1e-4, 2e-4, 4e-4)]
    finals = run_all(play_dpo, [(*kind, seed) for kind in kinds for seed in seeds])
    frame = pd.DataFrame(kinds, columns=["beta", "learning_rate"])
    for column in ("accuracy", "chosen", "rejected"):
        values = [row[column] for row in finals]
        frame[column] = [sum(values[i : i + len(seeds)]) / len(seeds) for i in range(0, len(values), len(seeds))]
    return frame


def play_dpo(beta: float, learning_rate: float, seed: int) -> dict:
    """The last row of one run's ledger."""
    budget = Budget(seed=seed, evaluate_on="validation")
    return train_dpo(Addition(), warm_start(), budget, DPOConfig(learning_rate, beta)).rows[-1]


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """The winning learning rate of each method and number of steps."""
    return frame.loc[frame.groupby(["method", "steps"], sort=False)["accuracy"].idxmax()]


def write(folder: Path, seeds: range) -> str:
    """Write sweep.csv and dpo_beta.csv into `folder`; return the winners, and the second table."""
    frame, betas = sweep(seeds), sweep_beta(seeds)
    for name, table in (("sweep", frame), ("dpo_beta", betas)):
        write_text(folder / f"{name}.csv", table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    return f"{best(frame).to_string(index=False)}\n\n{betas.to_string(index=False)}"
