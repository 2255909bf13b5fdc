"""GoodhartExplorer: every number is the mean of the seeds of the chosen run, and every completion has both verdicts."""

import html
import re

import pandas as pd
import pytest
from matplotlib.figure import Figure

from grpo_core.lab import goodhart_explorer, panel
from grpo_core.lab.goodhart_explorer import GoodhartExplorer, both_verdicts, over_seeds
from grpo_core.lab.panel import BLUE, GRAY, ORANGE

BETAS = {"leash 0.08": 0.08, "no leash": 0.0, "leash 1": 1.0}  # Not in the order of the slider.


@pytest.fixture(autouse=True)
def drawings(monkeypatch):
    """Pictures are kept as functions: drawing each one would take most of the time of these tests."""
    kept = []
    monkeypatch.setattr(
        goodhart_explorer, "figure_html", lambda draw, alt, size: kept.append(draw) or f'<img alt="{html.escape(alt)}">'
    )
    return kept


def axes_of(drawing):
    figure = Figure()
    drawing(figure)
    return figure.axes


def value(column, beta, seed, iteration):
    """A number that no other cell of the table has."""
    place = ["seen", "true", "greedy", "kl", "guesses"].index(column)
    return round(0.1 * place + 0.3 * beta + 0.01 * iteration + 0.002 * seed**2, 6)


@pytest.fixture(scope="module")
def history():
    columns = ["seen", "true", "greedy", "kl", "guesses"]
    return pd.DataFrame(
        {"run": run, "beta": beta, "seed": seed, "iteration": iteration}
        | {column: value(column, beta, seed, iteration) for column in columns}
        for run, beta in BETAS.items()
        for seed in range(3)
        for iteration in range(11)
    )


def entry(iteration, prompt="24+48=", text="72;"):
    return {"iteration": iteration, "prompt": prompt, "answer": "72", "texts": [text], "seen": [1.0], "true": [0.0]}


@pytest.fixture(scope="module")
def recording():
    return {
        "no leash": [entry(0, text="70,71,72;"), entry(5, text="<b>72,;"), entry(0, "1+71=", "7;"), entry(10, "1+71=", "8;")],
        "leash 0.08": [entry(0, text="74;")],
    }


@pytest.fixture
def explorer(history, recording):
    made = GoodhartExplorer(history, recording)
    yield made
    made.close()


def table(shown):
    rows = re.findall("<tr>(.*?)</tr>", shown)
    return [[html.unescape(cell) for cell in re.findall("<td><span>(.*?)</span></td>", row)] for row in rows[1:]]


def mean(column, beta, iteration):
    return sum(value(column, beta, seed, iteration) for seed in range(3)) / 3


def test_the_slider_goes_from_no_leash_to_the_strongest(explorer):
    assert explorer.beta.options == (("0", "no leash"), ("0.08", "leash 0.08"), ("1", "leash 1"))
    assert explorer.beta.value == "no leash" and explorer.iteration.value == 10


@pytest.mark.parametrize("iteration", [0, 5, 10])
@pytest.mark.parametrize(("index", "beta"), [(0, 0.0), (1, 0.08), (2, 1.0)])
def test_story_and_alternative_text_tell_the_means_of_the_chosen_run(explorer, index, beta, iteration):
    explorer.beta.index, explorer.iteration.value = index, iteration
    shown = explorer.html.value
    seen, true, greedy, kl, guesses = (mean(name, beta, iteration) for name in ("seen", "true", "greedy", "kl", "guesses"))
    assert f"beta {beta:g}, iteration {iteration}, mean of 3 seeds" in shown
    assert f"pays <b>{seen:.2f}</b>, truly right are <b>{true:.2f}</b> (greedy {greedy:.2f})" in shown
    assert f"KL {kl:.2f} nats and {guesses:.1f} guesses per completion" in shown
    assert f"pays {seen:.2f}, and {true:.2f} are truly right. Right: both over the KL, here {kl:.2f}" in shown


def test_over_seeds_is_mean_and_range(history):
    curves = over_seeds(history[history["run"] == "leash 1"])
    for iteration in range(11):
        values = [value("true", 1.0, seed, iteration) for seed in range(3)]
        assert curves["mean", "true"][iteration] == pytest.approx(sum(values) / 3)
        assert curves["min", "true"][iteration] == min(values) and curves["max", "true"][iteration] == max(values)


def test_completions_are_the_last_that_were_recorded_by_then(explorer):
    for iteration, recorded, text in ((0, 0, "70,71,72;"), (4, 0, "70,71,72;"), (5, 5, "<b>72,;"), (10, 5, "<b>72,;")):
        explorer.iteration.value = iteration
        assert f"Iteration {recorded}: what it answers to <code>24+48=</code> (true answer 72)" in explorer.html.value
        assert table(explorer.html.value) == [[text, "pays 1", "✗ wrong", "◀ paid, but wrong"]]
    assert "<b>72,;" not in explorer.html.value


def test_prompts_and_runs_have_their_own_completions(explorer):
    assert explorer.prompt.options == ("24+48=", "1+71=")
    explorer.prompt.value = "1+71="
    assert table(explorer.html.value)[0][0] == "8;"
    explorer.beta.value = "leash 0.08"
    assert "No completions were recorded here." in explorer.html.value
    explorer.prompt.value = "24+48="
    assert table(explorer.html.value)[0][0] == "74;"
    explorer.beta.value = "leash 1"
    assert "No completions were recorded here." in explorer.html.value


def test_without_any_recording_the_curves_are_still_there(history):
    explorer = GoodhartExplorer(history, {})
    assert "No completions were recorded here." in explorer.html.value and "<img alt=" in explorer.html.value
    explorer.close()


def test_where_pay_and_truth_differ_it_is_said_in_words():
    shown = both_verdicts(["72;", "71,72;", "73;", "7", "<i>", "72;"], [2, 1.0, 0.0, -0.5, 0.25, 0], [1.0, 0, 0, 0, 0, 1])
    assert table(shown) == [
        ["72;", "pays 2", "✓ right", ""],
        ["71,72;", "pays 1", "✗ wrong", "◀ paid, but wrong"],
        ["73;", "pays 0", "✗ wrong", ""],
        ["7", "pays −0.5", "✗ wrong", ""],
        ["<i>", "pays 0.25", "✗ wrong", "◀ paid, but wrong"],
        ["72;", "pays 0", "✓ right", "◀ right, but not paid"],
    ]
    assert "<i>" not in shown


def test_pictures_show_the_chosen_run_in_color_and_the_others_in_gray(explorer, drawings):
    explorer.beta.value, explorer.iteration.value = "leash 0.08", 4
    left, right = axes_of(drawings[-1])
    lines = {line.get_label(): line for line in left.lines}
    for label, column in (("the grader pays", "seen"), ("truly right", "true")):
        assert list(lines[label].get_ydata()) == pytest.approx([mean(column, 0.08, i) for i in range(11)])
    assert list(left.lines[-1].get_xdata()) == [4, 4], "the chosen iteration"
    colored = [line for line in right.lines if line.get_color() in (BLUE, ORANGE) and len(line.get_xdata()) > 1]
    for line, column in zip(colored, ("seen", "true"), strict=True):
        assert list(line.get_xdata()) == pytest.approx([mean("kl", 0.08, i) for i in range(11)])
        assert list(line.get_ydata()) == pytest.approx([mean(column, 0.08, i) for i in range(11)])
    points = [(line.get_marker(), *line.get_xydata()[0]) for line in right.lines if len(line.get_xdata()) == 1]
    assert points == [("o", *map(pytest.approx, (mean("kl", 0.08, 4), mean("seen", 0.08, 4)))),
                      ("s", *map(pytest.approx, (mean("kl", 0.08, 4), mean("true", 0.08, 4))))]  # fmt: skip
    gray = {tuple(line.get_xdata()) for line in right.lines if line.get_color() == GRAY}
    assert gray == {tuple(explorer.curves[run]["mean", "kl"]) for run in ("no leash", "leash 1")}


def test_the_picture_is_a_picture(explorer, monkeypatch):
    monkeypatch.setattr(goodhart_explorer, "figure_html", panel.figure_html)
    explorer.iteration.value = 4
    assert re.search(r'<img alt="Left: [^"]+" width="826" height="\d+" src="data:image/png;base64,\w+', explorer.html.value)


@pytest.mark.parametrize("column", ["seen", "kl", "run"])
def test_a_table_without_a_column_is_refused_in_words(history, recording, column):
    with pytest.raises(ValueError, match=f"the history has no {column}"):
        GoodhartExplorer(history.drop(columns=column), recording)


def test_an_empty_table_is_refused_in_words(history, recording):
    with pytest.raises(ValueError, match="the history has no rows"):
        GoodhartExplorer(history[:0], recording)


def test_the_saved_page_has_the_end_of_each_run_and_a_picture(explorer):
    saved = explorer._repr_mimebundle_()[0]["text/html"]
    columns = ("seen", "true", "greedy", "kl", "guesses")
    ends = [[f"{mean(name, beta, 10):.2f}" for name in columns] for beta in (0.0, 0.08, 1.0)]
    assert table(saved)[:3] == [[label, *end] for label, end in zip(("0", "0.08", "1"), ends)]
    assert re.search(r'<img alt="Left: both rewards over iterations at beta 0;', saved)
