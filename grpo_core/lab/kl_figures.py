"""Figures of notebook 04: the spread of the estimators against distance, and runs with different leashes."""

import matplotlib.pyplot as plt
import torch

from grpo_core.lab.gaussian_kl import closed_form
from grpo_core.lab.panel import BLUE, GRAY, ORANGE

STYLES = {"k1": (BLUE, "--"), "k2": (GRAY, ":"), "k3": (ORANGE, "-")}


def plot_spread(crossing: float) -> None:
    """Standard deviation of one sample, in units of the KL, against the distance of two Gaussians."""
    distances = torch.linspace(0.1, 2.2, 100).tolist()
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    for kind, (color, line) in STYLES.items():
        spread = [closed_form(mu)[kind][1] / (mu * mu / 2) for mu in distances]
        axes.plot(distances, spread, color=color, linestyle=line, label=kind)
    axes.axvline(crossing, color="black", linewidth=0.6)
    axes.set(xlabel="mu, distance of the two Gaussians", ylabel="std / KL", yscale="log")
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    plt.show()


def plot_runs(frames: dict[str, object]) -> None:
    """Accuracy and measured KL of runs, by name. The darker the line, the stronger the leash."""
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    shades = plt.get_cmap("viridis_r")(torch.linspace(0.1, 1, len(frames)).numpy())
    for (name, frame), color, marker in zip(frames.items(), shades, "os^vDPX*"):
        line = {"color": color, "marker": marker, "markersize": 4, "label": name}
        left.plot(frame.iteration, frame.accuracy, **line)
        right.plot(frame.iteration, frame.kl, **line)
    left.set(xlabel="iteration", ylabel="greedy accuracy", ylim=(0, 1))
    right.set(xlabel="iteration", ylabel="KL to the start, nats per token", ylim=(0, None))
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, fontsize=8)
    plt.show()
