"""The pictures of notebook 05 show the numbers they are given; the source is the file's, without the docstring."""

import inspect

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from grpo_core import Estimate, grpo_loss, grpo_update, train
from grpo_core.lab.full_run_figures import plot_differences, plot_loss_and_reward, plot_pass_at_k, source_of


@pytest.fixture(autouse=True)
def keep_figures(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    yield
    plt.close("all")


@pytest.mark.parametrize("function", [grpo_update, grpo_loss, train])
def test_source_is_the_files_own_without_the_docstring(function):
    source, whole = source_of(function), inspect.getsource(function)
    compile(source, "source", "exec")
    assert '"""' not in source and set(source.splitlines()) < set(whole.splitlines())
    assert whole.splitlines()[-1] in source and source.startswith(f"def {function.__name__}(")


def test_source_of_a_function_without_docstring_is_whole():
    assert source_of(keep_nothing) == inspect.getsource(keep_nothing).rstrip("\n")


def keep_nothing():
    return None


def test_pass_at_k_starts_at_the_mean_probability_and_rises():
    before, after = torch.tensor([0.0, 0.5]), torch.tensor([0.5, 1.0])
    plot_pass_at_k(before, after)
    low, high = (list(line.get_ydata()) for line in plt.gca().lines)
    assert low[:2] == pytest.approx([0.25, 0.375]) and high[:2] == pytest.approx([0.75, 0.875])


def test_differences_are_filled_only_where_the_interval_leaves_out_zero():
    plot_differences({"better": Estimate(0.2, 0.1, 0.3), "worse": Estimate(-0.2, -0.3, -0.1), "open": Estimate(0.1, -0.1, 0.3)})
    dots = [line for line in plt.gca().lines if line.get_marker() == "o"]
    assert [dot.get_markerfacecolor() == "white" for dot in dots] == [False, False, True]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [0.2, -0.2, 0.1]


def test_loss_stands_beside_the_leash_it_contains():
    plot_loss_and_reward(pd.DataFrame({"iteration": [1, 2], "reward": [0.3, 0.4], "loss": [0.0, 0.01], "kl": [0.0, 0.1]}), 0.08)
    _, right = plt.gcf().axes
    lines = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert lines["loss"] == [0.0, 0.01] and lines["leash: beta · KL"] == pytest.approx([0.0, 0.008])
