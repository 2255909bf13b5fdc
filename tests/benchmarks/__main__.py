"""Is one iteration fast, next to TRL's and next to its matrix products? `python -m tests.benchmarks`

All sides take turns in one process and the medians are compared, so that a busy machine slows down all alike. Where TRL
is not installed, its rows are left out. The table is printed and written into outputs/benchmark.md; about a minute.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import torch

from grpo_core import Addition, TinyGPT, warm_start
from grpo_core.report import write_text
from grpo_core.warm_start import init_weights

from .floor import Floor
from .ours import PIECES, Ours
from .tiny_trl import trl_is_installed
from .trl_side import time_trl

ROUNDS = 10
REPEATS = 3  # Of ours and the floor in each round: they are short.
THREADS = (1, 2)  # Both sides run with either.
TARGET_RATIO, TARGET_MEGABYTES = 6, 500
OUTPUT = Path(__file__).parents[2] / "outputs" / "benchmark.md"

Times = dict[str, list[float]]  # Milliseconds of each repetition


def main() -> None:
    torch.set_num_threads(1)
    print("Measuring the memory of a run …", flush=True)
    megabytes = peak_megabytes()  # First: a child starts with its parent's memory, which is small now.
    ours, untrained = Ours(warm_start()), Ours(init_weights(TinyGPT(len(Addition.vocab)), torch.Generator().manual_seed(0)))
    floor, floor_times = Floor(warm_start(), ours.config), defaultdict(list)
    our_times, untrained_times = ({threads: defaultdict(list) for threads in THREADS} for _ in range(2))

    def our_turn() -> None:
        turns = [(threads, ours, our_times[threads]) for threads in THREADS]
        turns += [(threads, untrained, untrained_times[threads]) for threads in THREADS]
        turns.append((1, floor, floor_times))
        for _ in range(REPEATS):
            for threads, side, times in turns:
                torch.set_num_threads(threads)
                for name, milliseconds in side.time_once().items():
                    times[name].append(milliseconds)

    our_turn()  # To warm up.
    for times in (*our_times.values(), *untrained_times.values(), floor_times):
        times.clear()
    trl_times, trl_parameters = {}, 0
    if trl_is_installed():
        print(f"Timing {ROUNDS} rounds next to TRL …", flush=True)
        trl_times, trl_parameters = time_trl(ROUNDS, THREADS, our_turn)
    else:
        print('TRL is not installed, so only ours is timed. pip install -e ".[real]" adds the comparison.', flush=True)
        for _ in range(ROUNDS):
            our_turn()
    parameters = sum(weight.numel() for weight in ours.policy.parameters())
    text = report(our_times, untrained_times, floor_times, trl_times, megabytes, parameters, trl_parameters)
    write_text(OUTPUT, text)
    print(f"\n{text}\n{OUTPUT}")


def peak_megabytes() -> float:
    """Peak memory of `python -m grpo_core`: 20 iterations with evaluation, figures included."""
    import resource  # Not on Windows.

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "grpo_core", "--output", folder]
        subprocess.run(command, check=True, capture_output=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux kilobytes.


def report(
    both: dict[int, Times],
    untrained: dict[int, Times],
    floor: Times,
    trl: dict[int, list[float]],
    megabytes: float,
    size: int,
    trl_size: int,
) -> str:
    """The tables as markdown, with what they were measured on."""
    ours = both[1]
    unit = statistics.median(ours["iteration"])
    lines = ["# Benchmark", "", *headline(both, untrained, trl, megabytes), ""]
    lines += ["| one iteration | ms, median | middle half of the repetitions | times ours |", "|---|---:|---:|---:|"]
    lines += [row(f"TRL, GPT-2 with {trl_size:,} parameters, threads: {n}", times, unit) for n, times in trl.items()]
    lines += [
        *(row(f"**grpo_core**, TinyGPT with {size:,} parameters, threads: {n}", both[n]["iteration"], unit) for n in THREADS),
        *(row(f"grpo_core on random weights, threads: {n}", untrained[n]["iteration"], unit) for n in THREADS),
        row("grpo_core and greedy accuracy on 400 problems, threads: 1", ours["with evaluation"], unit),
        row("floor: only the products with weight matrices, threads: 1", floor["iteration"], unit),
    ]
    lines += [
        "",
        "| where the time of grpo_core goes | ms, median | share | its products with weights, ms |",
        "|---|---:|---:|---:|",
    ]
    for name in PIECES:
        median = statistics.median(ours[name])
        products = f"{statistics.median(floor[name]):.1f}" if name in floor else "–"
        lines.append(f"| {name} | {median:.1f} | {median / unit:.0%} | {products} |")
    return "\n".join([*lines, "", *conditions(len(ours["iteration"]), trl)]) + "\n"


def row(name: str, times: list[float], unit: float) -> str:
    low, median, high = statistics.quantiles(times, n=4)
    return f"| {name} | {median:.1f} | {low:.1f} – {high:.1f} | {median / unit:.2f} |"


def headline(ours: dict[int, Times], untrained: dict[int, Times], trl: dict[int, list[float]], megabytes: float) -> list[str]:
    lines = [f"Peak memory of `python -m grpo_core`: {megabytes:.0f} MB (target: under {TARGET_MEGABYTES})."]
    if trl:
        trained, random = (
            " and ".join(f"{statistics.median(trl[n]) / statistics.median(side[n]['iteration']):.1f}" for n in THREADS)
            for side in (ours, untrained)
        )
        lines.insert(
            0,
            f"One iteration is {trained} times faster than TRL's with one and with two threads on both sides "
            f"(target: {TARGET_RATIO}); on random weights, where hardly a completion repeats another, {random} times.",
        )
    return lines


def conditions(repetitions: int, trl: dict[int, list[float]]) -> list[str]:
    """What was compared, and on what."""
    packages = ("torch", "trl", "transformers") if trl else ("torch",)
    counts = [f"{repetitions} of grpo_core with either"] + [
        f"{len(times)} of TRL with threads: {n}" for n, times in trl.items()
    ]
    lines = [
        "The work: 48 prompts × 8 completions of up to 4 new tokens, temperature 0.7, log-probs of the policy and the "
        "reference, 2 gradient steps, beta 0.08; float32 on the CPU.",
        f"The sides took turns in one process. Repetitions: {', '.join(counts)}.",
        f"Measured with Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in packages)}, "
        f"on {os.cpu_count()} processors ({platform.machine()}).",
    ]
    if trl:
        lines.insert(
            1,
            "grpo_core starts from the shipped policy, whose groups repeat themselves, and reads equal rows once. TRL does not "
            "look for them; it was timed on random weights only.",
        )
    return lines


if __name__ == "__main__":
    main()
