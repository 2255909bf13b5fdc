"""GaussianKL: its closed forms against quadrature and sampling, what it shows, and that a refusal is in words."""

import html
import math
import re

import numpy as np
import pytest
import torch

from grpo_core.lab.gaussian_kl import GaussianKL, closed_form, estimates

KINDS = ("k1", "k2", "k3", "k3 flipped")


def by_quadrature(mu, kind):
    """Mean and std under N(0, 1), from the definitions, in numpy: no code is shared with the library."""
    x = np.linspace(-14, 26, 400_001)
    weight = np.exp(-(x**2) / 2)
    weight /= weight.sum()
    d = (x**2 - (x - mu) ** 2) / 2
    values = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1, "k3 flipped": np.exp(-d) + d - 1}[kind]
    mean = (weight * values).sum()
    return mean, math.sqrt((weight * (values - mean) ** 2).sum())


def text(markup):
    return html.unescape(re.sub("<[^>]+>", " ", markup))


def rows(widget):
    """The table as {name: [numbers]}."""
    found = {}
    for row in re.findall("<tr>(.*?)</tr>", widget.html.value):
        name, *numbers = re.findall("<td><span>(.*?)</span></td>", row) or [None]
        if name:
            found[name] = [float(number.rstrip("%")) for number in numbers]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mu", [0.05, 0.1, 0.5, 1.0, 1.5])
def test_closed_form_is_the_integral(mu, kind):
    assert closed_form(mu)[kind] == pytest.approx(by_quadrature(mu, kind), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mu", [-1.0, -0.1])
def test_direction_of_the_move_does_not_matter(mu):
    for kind in ("k2", "k3", "k3 flipped"):
        assert closed_form(mu)[kind] == pytest.approx(closed_form(-mu)[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_are_their_formulas(kind):
    x = torch.tensor([-3.0, -0.2, 0.0, 0.4, 2.5], dtype=torch.float64)
    d = 0.7 * x.numpy() - 0.7**2 / 2
    expected = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1, "k3 flipped": np.exp(-d) + d - 1}[kind]
    assert estimates(0.7, x)[kind].numpy() == pytest.approx(expected)


def test_k3_is_quieter_below_1_121_and_louder_above():
    quieter = [closed_form(mu)["k3"][1] < closed_form(mu)["k1"][1] for mu in (0.1, 1.0, 1.12, 1.122, 2.0)]
    assert quieter == [True, True, True, False, False]


@pytest.mark.parametrize("mu", [0.1, 1.0, 2.0])
def test_table_shows_sampled_and_exact_numbers_of_the_slider(mu):
    widget = GaussianKL()
    widget.mu.value = mu
    assert set(rows(widget)) == {"k1", "k2", "k3"}
    for kind, (sampled, exact, bias, _, std, below) in rows(widget).items():
        mean, deviation = by_quadrature(mu, kind)
        kl = mu * mu / 2
        assert exact == pytest.approx(mean, abs=1e-4)
        assert bias == pytest.approx((mean - kl) / kl, abs=1e-3)
        assert std == pytest.approx(deviation / kl, abs=1e-3)
        assert sampled == pytest.approx(mean, abs=5 * deviation / math.sqrt(20_000) + 1e-4)
        assert (below > 10) == (kind == "k1")


def test_slider_moves_the_story_and_the_picture():
    widget = GaussianKL()
    before = widget.html.value
    widget.mu.value = 2.0
    assert before != widget.html.value
    assert "2.0000" in text(widget.html.value) and "Least spread: k1; 100 samples" in text(widget.html.value)
    assert 'alt="Histograms of k1, k2, k3 at mu = 2.00' in widget.html.value
    widget.mu.value = 0.1
    assert "Least spread: k3; 201 samples" in text(widget.html.value)


def test_flipped_k3_takes_the_place_of_k3():
    widget = GaussianKL()
    widget.k3.value = "flipped"
    assert set(rows(widget)) == {"k1", "k2", "k3 flipped"}
    assert rows(widget)["k3 flipped"][1] == pytest.approx(math.e - 1.5, abs=1e-4)


def test_draw_again_changes_the_samples_and_only_those():
    widget = GaussianKL()
    before = rows(widget)
    widget.again.click()
    after = rows(widget)
    assert all(before[kind][0] != after[kind][0] and before[kind][1] == after[kind][1] for kind in before)


def test_fewer_samples_are_drawn_and_named():
    widget = GaussianKL()
    widget.size.value = 100
    assert len(widget.x) == 100 and "mean of 100" in widget.html.value


def test_extremes_of_the_slider_are_shown():
    widget = GaussianKL()
    for mu in (widget.mu.min, widget.mu.max):
        widget.mu.value = mu
        assert "nan" not in widget.html.value and "inf" not in text(widget.html.value)


def test_static_twin_has_the_exact_table_and_no_sampled_number():
    widget = GaussianKL()
    words = " ".join(text(widget.static()).split())
    for row in ("0.1 0.005 0, 20.000 +0.0025, 1.418 0, 1.417", "1 0.500 0, 2.000 +0.2500, 1.732 0, 1.695"):
        assert row in words
    before = words
    widget.again.click()
    assert " ".join(text(widget.static()).split()) == before
    assert text(widget._repr_mimebundle_()[0]["text/html"]) == text(widget.static())


def test_same_draws_each_time_it_is_made():
    assert torch.equal(GaussianKL().x, GaussianKL().x)
