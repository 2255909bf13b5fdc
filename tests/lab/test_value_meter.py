"""The ValueMeter widget, and the pictures of notebook 01."""

import re

import matplotlib
import numpy as np
import pytest
import torch

from grpo_core import Addition, success_probability, warm_start
from grpo_core.lab import baseline_figures
from grpo_core.lab.value_meter import SIZES, ValueMeter, expected_rmse, group_means, rmse


@pytest.fixture(scope="module")
def policy():
    return warm_start()


@pytest.fixture
def meter(policy):
    return ValueMeter(policy=policy)


def shown(widget):
    return re.sub(r"<img.*?>", "", widget.html.value)


def errors(widget):
    """The table as numbers: one row (G, this time, all times, theory) for each group size."""
    cells = re.findall(r"<td><(?:b|span)>(.*?)</(?:b|span)></td>", shown(widget))
    return np.array(cells, dtype=float).reshape(-1, 4)


def test_values_are_exact_and_sorted(meter, policy):
    assert torch.equal(meter.values, meter.values.sort().values)
    assert torch.allclose(meter.values, success_probability(policy, Addition(), meter.problems, 0.7), atol=1e-6)
    assert set(meter.problems) <= set(Addition().validation)


def test_the_table_holds_what_numpy_computes(meter):
    meter.again.click()
    values = meter.values.numpy().astype(float)
    asked = [rewards.numpy().astype(float) for rewards in meter.asked]
    for size, now, over_all, theory in errors(meter):
        squares = [((rewards[:, : int(size)].mean(axis=1) - values) ** 2).mean() for rewards in asked]
        assert now == pytest.approx(squares[-1] ** 0.5, abs=6e-4)
        assert over_all == pytest.approx(np.mean(squares) ** 0.5, abs=6e-4)
        assert theory == pytest.approx((values * (1 - values) / size).mean() ** 0.5, abs=6e-4)
    assert errors(meter)[:, 0].tolist() == list(SIZES)


def test_asked_often_the_errors_meet_the_theory(meter):
    """Chance errors of the measured ones, over 24 prompts × 30 times, are a few percent."""
    for _ in range(29):
        meter.ask()
    meter.refresh()
    assert "asked 30 times" in shown(meter)
    for _, _, measured, theory in errors(meter):
        assert measured == pytest.approx(theory, rel=0.12)


def test_the_slider_adds_answers_to_the_same_group_and_asks_nothing(meter):
    rewards = meter.asked[-1].clone()
    for size in SIZES:
        meter.group_size.value = size
        assert f"G = {size}, asked once" in shown(meter)
        error = rmse(rewards[:, :size].mean(1), meter.values)
        assert f"by <b>{error:.3f}</b>" in shown(meter)
    assert len(meter.asked) == 1 and torch.equal(meter.asked[0], rewards)


def test_ask_again_asks_again(meter):
    before = meter.asked[-1].clone()
    meter.again.click()
    assert len(meter.asked) == 2
    assert not torch.equal(before, meter.asked[-1])
    assert torch.equal(before, meter.asked[0])
    assert f"by <b>{rmse(meter.asked[1][:, :8].mean(1), meter.values):.3f}</b>" in shown(meter)


def test_it_says_which_mean_is_closer_both_ways(meter):
    meter.asked = [torch.zeros(24, 32)]
    meter.values = torch.linspace(0, 1, 24)
    meter.refresh()
    assert "no closer than the batch's mean" in shown(meter)
    meter.values = torch.zeros(24)
    meter.asked = [torch.cat([torch.ones(1, 32), torch.zeros(23, 32)])]
    meter.values[0] = 1.0
    meter.refresh()
    assert "by <b>0.000</b>" in shown(meter) and "It is closer than the batch's mean" in shown(meter)


def test_group_means_take_the_first_answers():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    assert group_means(rewards, 2).tolist() == [0.5, 0.0]
    assert group_means(rewards, 4).tolist() == [0.25, 0.5]


def test_expected_rmse_is_that_of_the_binomial_distribution():
    """The error of every possible group, each weighed with its probability."""
    p, size = 0.3, 3
    groups = [[a, b, c] for a in (0.0, 1.0) for b in (0.0, 1.0) for c in (0.0, 1.0)]
    square = sum(np.prod([p if x else 1 - p for x in group]) * (np.mean(group) - p) ** 2 for group in groups)
    assert expected_rmse(torch.tensor([p, p]), size) == pytest.approx(square**0.5, rel=1e-6)
    assert expected_rmse(torch.tensor([0.0, 1.0]), 8) == 0.0


def test_other_problems_and_temperatures(policy):
    meter = ValueMeter(Addition().held_out[:3], policy, temperature=1.0)
    assert meter.asked[0].shape == (3, 32)
    assert torch.allclose(meter.values.sum(), success_probability(policy, Addition(), Addition().held_out[:3], 1.0).sum())


def test_the_static_twin_has_table_and_picture(meter):
    twin = meter._repr_mimebundle_()[0]["text/html"]
    assert twin.count("<tr>") == 1 + len(SIZES)
    assert 'alt="Exact value and mean of 8 answers' in twin
    assert twin == ValueMeter(policy=meter.policy)._repr_mimebundle_()[0]["text/html"]


@pytest.fixture
def axes(monkeypatch):
    """Draw without showing, and hand out the axes that were drawn last."""
    matplotlib.use("Agg")
    monkeypatch.setattr(baseline_figures.plt, "show", lambda: None)
    yield lambda: baseline_figures.plt.gcf().axes[0]
    baseline_figures.plt.close("all")


def test_plot_runs_shows_the_mean_and_the_range_over_seeds(axes):
    baseline_figures.plot_runs({"a": [[0.1, 0.2], [0.3, 0.8]], "b": [[0.5, 0.5], [0.5, 0.5]]}, every=3)
    first, second = axes().lines
    assert list(first.get_xdata()) == [0, 3] and np.allclose(first.get_ydata(), [0.2, 0.5])
    assert (first.get_marker(), first.get_linestyle()) != (second.get_marker(), second.get_linestyle())
    band = axes().collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(0.1) and band.max() == pytest.approx(0.8)


def test_plot_batches_shows_every_batch_and_their_mean(axes):
    baseline_figures.plot_batches({"raw": torch.tensor([-1.0, 0.0, 4.0]), "centered": torch.full((10,), 0.9)})
    dots, mean = axes().lines[:2]
    assert dots.get_xdata().tolist() == [-1.0, 0.0, 4.0]
    assert float(np.ravel(mean.get_xdata())[0]) == pytest.approx(1.0)
    assert [label.get_text() for label in axes().get_yticklabels()] == ["raw", "centered"]
