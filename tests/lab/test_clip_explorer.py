"""ClipExplorer, moved by value and by click, against the formula written out in plain Python; and its neighbors' pictures."""

import html
import re

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from grpo_core.lab.clip_explorer import SIGNS, ClipExplorer, objective
from grpo_core.lab.clipping_figures import plot_lengths, plot_ratios


def formula(r, advantage, low=0.8, high=1.2):
    return min(r * advantage, min(max(r, low), high) * advantage)


def text(source):
    return html.unescape(re.sub(r"<[^>]*>", " ", source))


def shown(explorer):
    return re.sub(r"\s+", " ", text(explorer.html.value))


def row(explorer, name):
    """The cells of a row of the table."""
    cells = re.search(rf"<td><(b|span)>{name}</\1></td>(.*?)</tr>", explorer.html.value)[2]
    return re.findall(r"<td><(?:b|span)>(.*?)</(?:b|span)></td>", cells)


@pytest.fixture
def explorer():
    made = ClipExplorer()
    yield made
    made.close()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("eps, side, high", [(0.2, "same as clip eps", 0.2), (0.2, "0.28 (DAPO)", 0.28), (0.45, "1.0", 1.0)])
def test_value_and_slope_are_those_of_the_formula_everywhere(explorer, advantage, eps, side, high, monkeypatch):
    monkeypatch.setattr(explorer, "view", lambda: "")  # No pictures: this test moves a thousand times.
    explorer.sign.value, explorer.clip_eps.value, explorer.clip_eps_high.value = advantage, eps, side
    low, top = 1 - eps, 1 + high
    for hundredths in range(251):
        r = explorer.ratio.value = hundredths / 100
        assert explorer.value == pytest.approx(formula(r, advantage, low, top), abs=1e-9)
        left, right = ((formula(r + h, advantage, low, top) - formula(r, advantage, low, top)) / h for h in (-1e-6, 1e-6))
        if abs(left - right) > 0.5:
            assert explorer.slope is None, r
        else:
            assert explorer.slope == pytest.approx(right, abs=1e-3), r


WORDS = {
    (1.0, 0.5): ("Outside the band (below), but on the side where the clip does not bind: slope +1.", "+1", "▲ pushed up"),
    (1.0, 0.8): ("Inside the band: the clip does nothing. Slope +1", "+1", "▲ pushed up"),
    (1.0, 1.0): ("Inside the band: the clip does nothing. Slope +1", "+1", "▲ pushed up"),
    (1.0, 1.2): ("On the corner of the curve: slope +1 on one side, 0 on the other.", "corner", "on the corner"),
    (1.0, 1.5): ("Outside the band (above), on the side where the advantage makes the clip bind: slope 0", "0", "● left alone"),
    (-1.0, 0.5): (
        "Outside the band (below), on the side where the advantage makes the clip bind: slope 0",
        "0",
        "● left alone",
    ),
    (-1.0, 0.8): ("On the corner of the curve: slope −1 on one side, 0 on the other.", "corner", "on the corner"),
    (-1.0, 1.2): ("Inside the band: the clip does nothing. Slope −1", "−1", "▼ pushed down"),
    (-1.0, 2.5): ("Outside the band (above), but on the side where the clip does not bind: slope −1.", "−1", "▼ pushed down"),
}


@pytest.mark.parametrize("advantage, r", WORDS)
def test_says_in_words_and_in_the_table_where_the_reader_stands(explorer, advantage, r):
    explorer.sign.value, explorer.ratio.value = advantage, r
    words, slope, push = WORDS[advantage, r]
    assert words in shown(explorer)
    value = f"{formula(r, advantage):+.3f}".replace("-", "−")
    assert row(explorer, "objective: the smaller one") == [value, slope, push]
    assert row(explorer, "ratio · A")[:2] == [f"{r * advantage:+.3f}".replace("-", "−"), "+1" if advantage > 0 else "−1"]
    outside = not 0.8 < r < 1.2
    assert (row(explorer, "clipped ratio · A")[1] in ("0", "corner")) == outside


def test_zero_is_written_without_a_sign(explorer):
    explorer.sign.value, explorer.ratio.value = -1.0, 0.0
    assert row(explorer, "ratio · A")[0] == "0.000"
    assert row(explorer, "objective: the smaller one")[0] == "−0.800"


def test_buttons_move_by_a_tenth_and_stop_at_the_ends(explorer):
    for expected in (1.1, 1.2, 1.3):
        explorer.up.click()
        assert explorer.ratio.value == expected  # Not 1.2000000000000002.
    explorer.ratio.value = 2.45
    explorer.up.click()
    assert explorer.ratio.value == 2.5
    explorer.ratio.value = 0.05
    explorer.down.click()
    assert explorer.ratio.value == 0.0


def test_each_control_shows_what_is_chosen(explorer):
    """A choice whose value is None would be shown as blank."""
    assert explorer.clip_eps_high.value == "same as clip eps"
    assert None not in dict(explorer.sign.options).values()


def test_clip_eps_moves_both_sides_unless_the_high_side_has_its_own(explorer):
    explorer.clip_eps.value = 0.4
    assert "the band is 0.60 to 1.40" in shown(explorer)
    explorer.clip_eps_high.value = "0.5"
    assert "the band is 0.60 to 1.50" in shown(explorer)


def test_clip_higher_moves_the_upper_side_alone(explorer):
    explorer.ratio.value = 1.25
    assert explorer.slope == 0
    explorer.clip_eps_high.value = "0.28 (DAPO)"
    assert explorer.slope == 1
    assert "the band is 0.80 to 1.28" in shown(explorer)
    explorer.sign.value, explorer.ratio.value = -1.0, 0.75
    assert explorer.slope == 0


def test_the_picture_changes_and_says_what_it_shows(explorer):
    pictures = set()
    for advantage, r in WORDS:
        explorer.sign.value, explorer.ratio.value = advantage, r
        pictures.add(re.search(r'src="([^"]+)"', explorer.html.value)[1])
        sign = "+1" if advantage > 0 else "−1"
        assert f"Marked: ratio {r:.2f}, A = {sign}" in re.search(r'alt="([^"]+)"', explorer.html.value)[1]
    assert len(pictures) == len(WORDS)


def test_static_twin_has_both_curves_and_leaves_the_slopes_to_the_reader(explorer):
    twin = explorer.static()
    assert "slope" not in text(twin)
    for name, advantage in SIGNS.items():
        for r in (0.5, 1.0, 1.5):
            cells = [name, f"{r:.2f}", *(f"{x:+.2f}" for x in (r * advantage, min(max(r, 0.8), 1.2) * advantage))]
            cells = [*cells, f"{formula(r, advantage):+.2f}"]
            assert " ".join(cells).replace("-", "−") in re.sub(r"\s+", " ", text(twin))
    assert twin.count("<img") == 1


def test_objective_is_vectorized_and_reaches_ratio_zero():
    ratios = torch.tensor([0.0, 0.3, 0.95, 4.0], dtype=torch.float64)
    for advantage in (1.0, -1.0, 2.5):
        expected = torch.tensor([formula(r, advantage) for r in ratios.tolist()], dtype=torch.float64)
        assert torch.allclose(objective(ratios, advantage), expected)


@pytest.fixture
def canvas():
    """pyplot without a window; yields a function that gives the axes of the figure drawn last."""
    backend = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield lambda: plt.gcf().axes
    plt.close("all")
    plt.switch_backend(backend)


def test_histograms_color_what_lies_outside_the_band_and_lose_no_token(canvas):
    ratios = torch.tensor([1.0] * 5 + [0.79, 1.21, 1e-6, 1e6])
    plot_ratios({1: torch.ones(4), 3: ratios})
    one, three = canvas()
    assert (one.get_title(), three.get_title()) == ("before step 1", "before step 3")
    inside, outside = (sum(bar.get_height() for bar in bars) for bars in three.containers)
    assert (inside, outside) == (5, 4)


def test_lengths_have_a_panel_for_each_way(canvas):
    history = torch.tensor([[[5.0, 5.0], [9.0, 2.0]], [[5.0, 5.0], [11.0, 4.0]]])
    plot_lengths({"sequence": history, "token": history})
    panels = canvas()
    assert [axes.get_title() for axes in panels] == ["sequence", "token"]
    means = {line.get_label(): line.get_ydata().tolist() for line in panels[0].lines if not line.get_label().startswith("_")}
    assert means == {"wrong answers": [5.0, 10.0], "right answers": [5.0, 3.0]}
