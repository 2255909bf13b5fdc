"""What a run shows: the worked group, the table, the figures, and the file that holds it all."""

import io
import math
import statistics
import threading

import numpy as np
import pandas as pd
import pytest
import torch

from grpo_core import Addition, GRPOConfig, History, Problem, Rollout, sample_groups, warm_start
from grpo_core.history import COLUMNS
from grpo_core.report import (
    KL_BAND,
    REFERENCE,
    accuracy_figure,
    combine,
    group_example,
    kl_figure,
    over_seeds,
    summary_table,
    write_figure,
    write_report,
)

ITERATIONS = range(21)


def make_history(offset=0.0, iterations=ITERATIONS, measured=ITERATIONS):
    """A run that nobody ran: each number tells its column, iteration and seed apart."""
    rows = []
    for i in iterations:
        row = {"iteration": i, "seconds": 0.1}
        if i > 0:
            row |= {"reward": 0.3 + i / 100 + offset, "kl": 0.01 * i + offset / 10, "entropy": 1 / (i + 3)}
        if i in measured:
            accuracy = 0.36 + i / 60 + offset
            row |= {"accuracy": accuracy, "accuracy_low": accuracy - 0.05, "accuracy_high": accuracy + 0.04}
        rows.append(row)
    return History(rows)


def one():
    return combine({0: make_history()})


def three():
    return combine({0: make_history(-0.01), 1: make_history(0.02), 2: make_history(0.05)})


def student_t(n):
    """97.5 % quantile with n − 1 degrees of freedom, where it has a closed form: 1, 2 and 4."""
    tail = math.sqrt(1 - 0.95**2)
    q = math.cos(math.acos(tail) / 3) / tail
    return {2: math.tan(0.475 * math.pi), 3: 0.95 * math.sqrt(2) / tail, 5: 2 * math.sqrt(q - 1)}[n]


# The worked group


def recorded_group(rewards=(0, 1, 0, 0, 0, 1, 0, 0), texts=("74;", "72;", "73;", "74;", "73;", "72;", "73;", "74;")):
    shape = (len(texts), 1)
    return Rollout(
        prompt_ids=torch.zeros(shape, dtype=torch.long),
        completion_ids=torch.zeros(shape, dtype=torch.long),
        completion_mask=torch.ones(shape, dtype=torch.bool),
        old_log_probs=torch.zeros(shape),
        rewards=torch.tensor([rewards], dtype=torch.float32),
        temperature=0.7,
        texts=texts,
        problems=[Problem("24+48=", "72")],
    )


def test_the_recorded_group_as_a_table():
    assert group_example(recorded_group(), GRPOConfig()) == (
        "Prompt 24+48=  true answer 72\n"
        "\n"
        "| completion | 74; | 72; | 73; | 74; | 73; | 72; | 73; | 74; |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
        "| reward | 0 | 1 | 0 | 0 | 0 | 1 | 0 | 0 |\n"
        "| advantage | −0.577 | +1.732 | −0.577 | −0.577 | −0.577 | +1.732 | −0.577 | −0.577 |\n"
    )


@pytest.mark.parametrize(
    "settings, low, high",
    [({"correction": 1}, "−0.540", "+1.620"), ({"scale": "none"}, "−0.250", "+0.750")],
    ids=["sample standard deviation", "centered only"],
)
def test_the_group_follows_the_settings_of_the_run(settings, low, high):
    last = group_example(recorded_group(), GRPOConfig(**settings)).splitlines()[-1]
    assert last.split(" | ")[1:3] == [low, high]


def test_a_flat_group_and_fractional_rewards():
    table = group_example(recorded_group(rewards=(0.25,) * 8), GRPOConfig())
    assert table.count("| 0.25 ") == 8 and table.count("| +0.000 ") == 8


def test_the_group_of_a_real_rollout():
    task, config = Addition(), GRPOConfig(group_size=3)
    problems = [task.train[5], task.example]
    rollout = sample_groups(warm_start(), task, problems, 3, generator=torch.Generator().manual_seed(0))
    for group, problem in enumerate(problems):
        lines = group_example(rollout, config, group).splitlines()
        assert problem.prompt in lines[0] and problem.answer in lines[0]
        cells = [line.strip("| ").split(" | ") for line in lines[2:] if "---" not in line]
        assert cells[0][1:] == rollout.texts[3 * group : 3 * group + 3]
        assert [float(cell) for cell in cells[1][1:]] == rollout.rewards[group].tolist()


# Numbers over iterations


def test_one_seed_shows_its_own_interval():
    curve = over_seeds(one(), "accuracy")
    assert curve.index.tolist() == list(ITERATIONS)
    assert curve.loc[6].tolist() == pytest.approx([0.46, 0.41, 0.50])


def test_one_seed_has_no_interval_where_none_was_measured():
    curve = over_seeds(one(), "kl")
    assert curve.index.tolist() == list(ITERATIONS)[1:], "the start policy's row has no KL"
    assert curve.loc[4].tolist() == pytest.approx([0.04] * 3)


@pytest.mark.parametrize("offsets", [(-0.01, 0.03), (-0.01, 0.02, 0.05), (0.0, 0.04, -0.02, 0.01, 0.07)], ids=len)
@pytest.mark.parametrize("column, center", [("accuracy", 0.46), ("reward", 0.36), ("kl", 0.06)])
def test_several_seeds_show_their_mean_with_student_s_interval(offsets, column, center):
    frame = combine({seed: make_history(offset) for seed, offset in enumerate(offsets)})
    shown = over_seeds(frame, column).loc[6]
    values = [center + offset / (10 if column == "kl" else 1) for offset in offsets]
    half = student_t(len(offsets)) * statistics.stdev(values) / math.sqrt(len(offsets))
    assert shown["value"] == pytest.approx(statistics.mean(values))
    assert shown["high"] - shown["value"] == pytest.approx(half, rel=1e-4)
    assert shown["value"] - shown["low"] == pytest.approx(half, rel=1e-4)


def test_closed_forms_are_student_s_quantiles():
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed; the closed forms stand alone")
    for n in (2, 3, 5):
        assert student_t(n) == pytest.approx(stats.t.ppf(0.975, n - 1))


def test_a_seed_that_stopped_early_leaves_the_others_their_mean():
    frame = combine({0: make_history(), 1: make_history(0.1, range(4))})
    curve = over_seeds(frame, "accuracy")
    assert curve.loc[3, "value"] == pytest.approx(0.46)
    assert curve.loc[20, "value"] == pytest.approx(0.36 + 20 / 60)
    assert math.isnan(curve.loc[20, "low"]), "one value has no interval"


# The table in the terminal


def table_rows(text):
    return {int(line.split()[0]): line for line in text.splitlines()[1:]}


def test_table_of_one_seed():
    rows = table_rows(summary_table(one()))
    assert list(rows) == [0, 5, 10, 15, 20]
    assert rows[10].split() == ["10", "0.527", "0.477", "to", "0.567", "0.400", "0.100"]
    assert rows[0].split()[1:5] == ["0.360", "0.310", "to", "0.400"]
    assert "nan" not in rows[0], "before training there is no reward and no KL"


def test_table_of_several_seeds():
    rows = table_rows(summary_table(three()))
    half = student_t(3) * 0.03 / math.sqrt(3)
    mean = 0.36 + 10 / 60 + 0.02
    assert rows[10].split() == ["10", f"{mean:.3f}", f"{mean - half:.3f}", "to", f"{mean + half:.3f}", "0.420", "0.102"]


def test_table_ends_with_the_last_iteration_and_keeps_its_columns():
    text = summary_table(combine({0: make_history(iterations=range(8))}))
    assert list(table_rows(text)) == [0, 5, 7]
    assert len({len(line) for line in text.splitlines()}) == 1
    assert {len(line) for line in summary_table(three()).splitlines()} == {len(line) for line in text.splitlines()}


def test_table_where_accuracy_was_not_always_measured():
    assert list(table_rows(summary_table(combine({0: make_history(measured={0, 10, 20})})))) == [0, 10, 20]


# Figures


def drawn(axes):
    """{label: (x, y)} of the lines."""
    return {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines}


def band(axes):
    """[(x, low, high)] of the filled area, one for each x."""
    vertices = axes.collections[0].get_paths()[0].vertices
    return [
        (x, vertices[vertices[:, 0] == x, 1].min(), vertices[vertices[:, 0] == x, 1].max()) for x in np.unique(vertices[:, 0])
    ]


@pytest.mark.parametrize("make", [accuracy_figure, kl_figure])
@pytest.mark.parametrize("frame", [one, three])
def test_figures_say_what_they_show(make, frame):
    (axes,) = make(frame()).axes
    assert axes.get_title() and axes.get_xlabel() == "iteration"
    assert ("accuracy" if make is accuracy_figure else "KL") in axes.get_ylabel()
    assert len(axes.get_legend().get_texts()) == 2


def test_accuracy_figure_draws_the_run_its_band_and_the_reference():
    (axes,) = accuracy_figure(one()).axes
    (x, y), (reference_x, reference_y) = drawn(axes).values()
    assert x == list(ITERATIONS) and y == pytest.approx([0.36 + i / 60 for i in ITERATIONS])
    assert dict(zip(reference_x, reference_y)) == {0: 0.360, 5: 0.488, 10: 0.555, 15: 0.610, 20: 0.522} == REFERENCE
    assert [axes.get_ylim()[0], axes.get_ylim()[1]] == [0, 1]
    for i, low, high in band(axes):
        assert (low, high) == pytest.approx((0.31 + i / 60, 0.40 + i / 60))


def test_accuracy_figure_of_several_seeds_has_the_band_of_their_mean():
    figure = accuracy_figure(three())
    half = student_t(3) * 0.03 / math.sqrt(3)
    for i, low, high in band(figure.axes[0]):
        assert (low, high) == pytest.approx((0.38 + i / 60 - half, 0.38 + i / 60 + half), rel=1e-4)
    assert "3" in " ".join(drawn(figure.axes[0]))


def test_kl_figure_draws_the_run_and_marks_the_healthy_band():
    (axes,) = kl_figure(one()).axes
    ((x, y),) = drawn(axes).values()
    assert x == list(ITERATIONS)[1:] and y == pytest.approx([0.01 * i for i in x])
    (span,) = axes.patches
    edges = span.get_extents().transformed(axes.transData.inverted())
    assert (edges.y0, edges.y1) == pytest.approx((0.02, 0.4)) == KL_BAND
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize("iterations", [range(1), range(2), range(4)], ids=len)
def test_a_short_run_can_be_drawn(iterations):
    frame = combine({0: make_history(iterations=iterations)})
    for make in (accuracy_figure, kl_figure):
        make(frame).savefig(io.BytesIO())


def test_figures_are_the_same_bytes_each_time_and_on_any_thread(tmp_path):
    def draw(name):
        write_figure(tmp_path / f"{name}-accuracy.png", accuracy_figure(three()))
        write_figure(tmp_path / f"{name}-kl.png", kl_figure(three()))

    threads = [threading.Thread(target=draw, args=[name]) for name in "ab"]
    draw("here")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in ("accuracy", "kl"):
        assert len({path.read_bytes() for path in tmp_path.glob(f"*-{kind}.png")}) == 1
        assert len(list(tmp_path.glob(f"*-{kind}.png"))) == 3


# history.csv


def test_history_comes_back_from_its_file(tmp_path):
    frame = write_report({3: make_history(measured={0, 20}), 5: make_history(1 / 3)}, tmp_path)
    back = pd.read_csv(tmp_path / "history.csv")
    assert list(back.columns) == ["seed", *COLUMNS]
    pd.testing.assert_frame_equal(back, frame.reset_index(drop=True), rtol=1e-5, check_exact=False, check_dtype=False)
    assert back["seed"].tolist() == [3] * 21 + [5] * 21
    assert back["accuracy"].isna().sum() == 19, "what was not measured is empty, not 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grpo_accuracy.png", "grpo_kl.png", "history.csv"]
