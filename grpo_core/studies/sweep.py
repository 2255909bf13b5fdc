"""The sweep behind the scoreboard: each method at several learning rates, on validation problems and seeds of their own.

Every method gets the same rates to try. The best one by the mean over seeds is what the scoreboard uses.
"""

from pathlib import Path

import pandas as pd

from grpo_core.report import write_text
from grpo_core.studies.runs import run_all
from grpo_core.studies.scoreboard import METHODS, STEPS, play

FOLDER, SEEDS = Path("outputs/scoreboard"), range(100, 103)
RATES = (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4)


def sweep(seeds: range) -> pd.DataFrame:
    """Final validation accuracy of each method, number of gradient steps and learning rate, mean over seeds."""
    kinds = [(name, steps, rate) for steps in STEPS for name in METHODS for rate in RATES]
    jobs = [(name, steps, seed, rate) for name, steps, rate in kinds for seed in seeds]
    finals = [rows[-1]["accuracy"] for rows in run_all(play, jobs)]
    frame = pd.DataFrame([(*kind, len(seeds)) for kind in kinds], columns=["method", "steps", "learning_rate", "seeds"])
    frame["accuracy"] = [sum(finals[i : i + len(seeds)]) / len(seeds) for i in range(0, len(finals), len(seeds))]
    return frame


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """The winning learning rate of each method and number of steps."""
    return frame.loc[frame.groupby(["method", "steps"], sort=False)["accuracy"].idxmax()]


def write(folder: Path, seeds: range) -> str:
    """Write sweep.csv into `folder`; return the winners."""
    frame = sweep(seeds)
    write_text(folder / "sweep.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    return best(frame).to_string(index=False)
