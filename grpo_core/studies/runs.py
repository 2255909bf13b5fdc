"""Many runs side by side, and a note of what made them.

Each run has a process of its own with one torch thread, so that it gives the same numbers as alone.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from grpo_core.history import TrainingDiverged
from grpo_core.provenance import code_version, start_policies
from grpo_core.report import write_json


def run_all(function: Callable, jobs: Sequence[tuple], processes: int | None = None) -> list:
    """[function(*job) for job in jobs], several at a time.

    Args:
        function: of a module's top level, so that another process can import it.
        jobs: arguments of each call. Long ones should come first.
        processes: at a time; as many as there are cores by default, and no more than eight.

    Raises:
        Whatever a call raises; the jobs that have not begun are dropped.
    """
    workers = min(processes or os.cpu_count() or 1, len(jobs), 8)
    context = multiprocessing.get_context("spawn")  # A forked torch may hang.
    with ProcessPoolExecutor(max(workers, 1), context, torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(_call, function, *job) for job in jobs]
        try:
            for future in tqdm(as_completed(futures), total=len(jobs), unit="run"):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _call(function: Callable, *job):
    try:
        return function(*job)
    except TrainingDiverged as error:  # It holds a whole history, and does not survive the way between processes.
        raise FloatingPointError(str(error)) from None


def write_settings(folder: Path, settings: dict, *modules: str) -> None:
    """Write settings.json: the settings of a study, the version of the code that `modules` and their imports make up, and
    that of the start policies."""
    made_by = {"code": code_version(*modules), "modules": modules, "start_policies": start_policies()}
    write_json(folder / "settings.json", made_by | settings)
