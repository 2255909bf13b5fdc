"""BetaLab: settings reach the run, impossible ones are refused in words, runs are compared in one picture and one table."""

import base64
import html
import io
import re

import pandas as pd
import pytest
from matplotlib.figure import Figure

from grpo_core import GRPOConfig
from grpo_core.lab import beta_lab
from grpo_core.lab.beta_lab import LOOKS, RECORDED, WORDS, BetaLab, differences, frame_of, recorded_runs
from grpo_core.lab.live_run import Training

SMALL = {"prompts_per_iteration": 12, "group_size": 2, "iterations": 5}


@pytest.fixture
def lab():
    made = BetaLab(**SMALL)
    yield made
    made.close()


def table(shown):
    """The rows of the table of runs, as lists of texts."""
    rows = re.findall("<tr>(.*?)</tr>", shown)[1:]
    return [[html.unescape(cell) for cell in re.findall("<td><span>(.*?)</span></td>", row)] for row in rows]


def test_it_starts_at_the_defaults_and_measures_on_validation_problems():
    lab = BetaLab()
    assert lab.config == GRPOConfig(evaluate_on="validation")
    assert set(lab.controls) == set(WORDS) <= set(vars(GRPOConfig()))
    assert "Next run: defaults; 384 completions an iteration." in lab.html.value
    lab.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta", 0.3), ("clip_eps", 0.5), ("group_size", 4), ("prompts_per_iteration", 96), ("temperature", 1.0),
        ("inner_epochs", 4), ("learning_rate", 1e-3), ("aggregation", "sequence"), ("scale", "none"), ("correction", 1),
        ("iterations", 40), ("seed", 7),
    ],
)  # fmt: skip
def test_each_control_reaches_the_run(lab, name, value):
    lab.controls[name].value = value
    assert getattr(lab.config, name) == value == getattr(lab.make().config, name)
    assert f"{WORDS[name]} {value}" in lab.html.value


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_size", 1), ("temperature", 0.0), ("clip_eps", 0.0), ("clip_eps", 1.0), ("learning_rate", 0.0)],
)
def test_impossible_settings_are_refused_in_words_and_other_runs_stay(lab, name, value):
    lab.runs = recorded_runs()[:1]
    lab.controls[name].value = value
    assert re.search(rf"<b>Not possible:</b> {name}", lab.html.value)
    lab.run_button.click()
    assert len(lab.runs) == 1 and not lab.busy and len(table(lab.html.value)) == 1
    assert re.search(rf"<b>Not possible:</b> {name}", lab.html.value)


def test_a_double_click_adds_one_run(lab, monkeypatch):
    monkeypatch.setattr(Training, "start", lambda self, _: setattr(self, "state", "running"))
    lab.run_button.click()
    lab.run_button.click()
    assert len(lab.runs) == 1 and lab.run_button.disabled
    assert "running at iteration 0" in table(lab.html.value)[0]


def test_runs_add_up_in_table_frame_and_csv(lab):
    lab.run_button.click()
    lab.training.wait()
    lab.controls["beta"].value = 0.3
    lab.run_button.click()
    lab.training.wait()
    rows, frame = table(lab.html.value), lab.frame
    assert [row[0] for row in rows] == ["● 1", "■ 2"] and "beta 0.3" in rows[1][1]
    last = lab.runs[1].history.rows[-1]
    assert frame.accuracy[1] == last["accuracy"] and frame.kl[1] == last["kl"] and frame.beta.tolist() == [0.08, 0.3]
    assert rows[1][2] == f"{last['accuracy']:.3f} [{last['accuracy_low']:.3f}, {last['accuracy_high']:.3f}]"
    assert rows[1][3] == f"{last['kl']:.3f}" and rows[1][5] == "finished"
    data = re.search(r'download="runs.csv" href="data:text/csv;base64,([^"]*)"', lab.html.value)[1]
    saved = pd.read_csv(io.BytesIO(base64.b64decode(data)))
    pd.testing.assert_frame_equal(saved, frame, check_dtype=False)


def test_add_trains_in_the_calling_cell(lab):
    run = lab.add(**SMALL, beta=1.0)
    assert run.state == "finished" and lab.runs == [run] and run.config.beta == 1.0
    assert run.config.evaluate_on == "validation" and lab.progress.value == 5


def test_clear_during_a_run_stops_and_forgets_it(lab):
    lab.controls["iterations"].value = 60
    lab.run_button.click()
    running = lab.training
    lab.clear_button.click()
    assert lab.runs == [] and not lab.busy and not lab.run_button.disabled
    running.wait()
    assert running.state == "stopped"
    assert table(lab.html.value) == [] and "runs.csv" not in lab.html.value and lab.progress_text.value == "press Run"
    lab.controls["iterations"].value = 5
    lab.run_button.click()
    lab.training.wait()
    assert [row[0] for row in table(lab.html.value)] == ["● 1"] and lab.runs[0].state == "finished"


def test_stop_keeps_the_part_of_the_curve(lab):
    lab.controls["iterations"].value = 60
    lab.run_button.click()
    lab.stop_button.click()
    lab.training.wait()
    assert lab.runs[0].state == "stopped" and lab.runs[0].iteration < 60
    assert table(lab.html.value)[0][5] == f"stopped at iteration {lab.runs[0].iteration}"
    assert not lab.run_button.disabled


def test_a_run_stopped_before_its_first_measurement_has_dashes(lab):
    lab.training = Training(lab.config)
    lab.runs.append(lab.training)
    lab.training.stop()
    lab.training.run()
    lab.refresh()
    assert table(lab.html.value)[0][2:] == ["–", "–", "0.0", "stopped at iteration 0"]
    assert lab.frame.loc[0, ["accuracy", "accuracy_low", "kl"]].isna().all()


def test_a_run_that_lost_its_way_is_kept_with_its_reason(lab):
    run = lab.add(**SMALL, learning_rate=1e20)
    assert table(lab.html.value)[0][5] == f"diverged at iteration {run.iteration}"
    assert "Run 1: iteration" in lab.html.value and "is too high" in lab.html.value
    assert lab.frame.accuracy[0] == run.history.rows[-1]["accuracy"]


def test_a_closed_lab_stops_its_run(lab):
    lab.controls["iterations"].value = 60
    lab.run_button.click()
    lab.close()
    lab.training.wait()
    assert lab.training.state == "stopped"


def test_runs_differ_in_color_and_marker_and_carry_their_number(lab, monkeypatch):
    figures = []

    def draw_only(draw, alt, size):
        figures.append(Figure(figsize=size))
        draw(figures[-1])
        return html.escape(alt)

    monkeypatch.setattr(beta_lab, "figure_html", draw_only)
    first, second = lab.add(**SMALL), lab.add(**SMALL, seed=1)
    accuracy, kl = figures[-1].axes
    for axes, column in ((accuracy, "accuracy"), (kl, "kl")):
        for line, run in zip(axes.lines, (first, second), strict=True):
            assert list(line.get_ydata()) == [row[column] for row in run.history.rows if column in row]
        assert [text.get_text() for text in axes.texts] == ["1", "2"]
    looks = [(line.get_color(), line.get_marker()) for line in accuracy.lines]
    assert looks == [look[:2] for look in LOOKS[:2]]
    assert [len(set(part)) for part in zip(*LOOKS)] == [len(LOOKS)] * 3
    assert f"run 1 {first.accuracy}, run 2 {second.accuracy}" in lab.html.value


def test_more_runs_than_looks_are_still_told_apart_by_number(lab):
    lab.runs = [run for _ in range(4) for run in recorded_runs()]
    lab.refresh()
    assert [row[0].split()[1] for row in table(lab.html.value)] == [str(i) for i in range(1, 13)]


def test_differences_name_only_what_was_changed():
    assert differences(GRPOConfig(evaluate_on="validation", evaluate_every=5)) == "defaults"
    assert differences(GRPOConfig(scale="none", seed=3)) == "scale none, seed 3"


def test_the_saved_page_shows_recorded_runs_until_there_are_others(lab):
    saved = lab._repr_mimebundle_()[0]["text/html"]
    assert [row[1] for row in table(saved)] == ["defaults", "beta 0.0", "beta 1.0"] and "runs.csv" not in saved
    lab.add(**SMALL)
    assert len(table(lab.static())) == 1


def test_recorded_runs_are_what_a_fresh_run_gives():
    """Three seeds reach within 0.02 of one another at the end; another processor is like another seed."""
    recorded = next(run for run in recorded_runs() if run.config.beta == 1.0)
    fresh = Training(GRPOConfig(beta=1.0, evaluate_on="validation", evaluate_every=5)).run()
    assert [row["iteration"] for row in recorded.history.rows] == list(range(0, 21, 5))
    assert recorded.history.rows[0]["accuracy"] == pytest.approx(fresh.history.rows[0]["accuracy"], abs=0.005)
    assert recorded.accuracy == pytest.approx(fresh.accuracy, abs=0.1)
    assert recorded.latest("kl") == pytest.approx(fresh.latest("kl"), abs=0.04)
    assert frame_of(recorded_runs()).beta.tolist() == list(RECORDED)


def test_a_moved_slider_draws_no_picture_and_a_new_row_does(lab, monkeypatch):
    drawn = []
    monkeypatch.setattr(beta_lab, "figure_html", lambda *_, **__: drawn.append(1) or "")
    lab.controls["beta"].value = 0.5
    assert not drawn and "beta 0.5" in lab.html.value
    lab.add(**SMALL)
    assert drawn
