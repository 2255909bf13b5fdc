"""Training, watched: the same run as unwatched, stoppable at any moment, and every end in words."""

import html
import re
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from matplotlib.figure import Figure

from grpo_core import Addition, GRPOConfig, train, warm_start
from grpo_core.lab import live_run
from grpo_core.lab.group_stepper import Group
from grpo_core.lab.live_run import LiveRun, Training, TrainingPanel, curve, group_table
from grpo_core.report import REFERENCE

SMALL = GRPOConfig(prompts_per_iteration=4, group_size=4, iterations=3)
LOST = GRPOConfig(prompts_per_iteration=4, group_size=4, iterations=5, learning_rate=1e20)


def without_seconds(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_watching_a_run_changes_nothing(task):
    plain, policy = [], warm_start()
    train(task, policy, SMALL, on_iteration=lambda row, _: plain.append(row))
    training = Training(SMALL).run()
    assert training.state == "finished" and training.status == "finished at iteration 3 of 3"
    assert without_seconds(training.history.rows) == without_seconds(plain)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), training.policy.parameters()))
    assert training.seconds == sum(row["seconds"] for row in training.history.rows) > 0


def test_each_row_has_a_group_of_the_example_and_that_of_row_1_was_trained_on(task):
    rollouts, config = [], replace(SMALL, group_size=16)
    train(task, warm_start(), config, on_iteration=lambda _, rollout: rollouts.append(rollout))
    training = Training(config).run()
    assert [group.prompt for group in training.groups] == [task.example.prompt] * 4
    assert training.groups[1] == Group.of(rollouts[1])
    assert all(len(group.texts) == 16 for group in training.groups)


def test_a_run_may_start_from_another_policy_on_another_task():
    """A policy without a head answers anything at all: a task that pays for a semicolon soon moves it."""
    task, policy = Addition(digits=1), warm_start()
    task.verify = lambda completion, answer: float(completion.endswith(";"))
    torch.nn.init.zeros_(policy.head.weight)
    before = [weight.clone() for weight in policy.parameters()]
    training = Training(SMALL, policy, task).run()
    assert training.state == "finished" and {group.prompt for group in training.groups} == {task.example.prompt}
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters())), "it trains a copy"
    assert any(not torch.equal(a, b) for a, b in zip(before, training.policy.parameters()))


def test_stop_before_the_first_iteration_leaves_an_empty_run():
    training = Training(SMALL)
    training.stop()
    training.run()
    assert training.status == "stopped at iteration 0 of 3"
    assert training.accuracy is None and training.latest("kl") is None and training.seconds == 0
    assert all(torch.equal(a, b) for a, b in zip(warm_start().parameters(), training.policy.parameters()))


def test_stop_in_the_middle_keeps_what_there_is():
    training = Training(SMALL)
    training.run(lambda: training.iteration == 2 and training.stop())
    assert training.status == "stopped at iteration 2 of 3" and len(training.history.rows) == 3
    assert training.accuracy == training.history.rows[2]["accuracy"]
    assert training.accuracy.low == training.history.rows[2]["accuracy_low"]


def test_a_run_that_diverges_says_so_and_keeps_its_rows():
    training = Training(LOST).run()
    assert training.state == "diverged" and "learning_rate 1e+20 is too high" in training.problem
    assert training.history.rows[0]["accuracy"] == pytest.approx(0.35, abs=0.02)


def test_whatever_goes_wrong_on_the_worker_is_said():
    training = Training(GRPOConfig(prompts_per_iteration=10**6))
    training.start(lambda: None)
    training.wait()
    assert training.state == "failed" and training.problem.startswith("ValueError: prompts_per_iteration")


def test_latest_and_curve_skip_iterations_that_were_not_measured():
    rows = [{"iteration": 0, "accuracy": 0.3}, {"iteration": 1, "kl": 0.1}, {"iteration": 2, "accuracy": 0.4}]
    training = Training(SMALL)
    training.history.rows = rows
    assert curve(rows, "accuracy") == ([0, 2], [0.3, 0.4]) and curve(rows, "kl") == ([1], [0.1])
    assert training.latest("accuracy") == 0.4 and training.latest("kl") == 0.1 and training.latest("loss") is None


@pytest.fixture
def panel():
    made = LiveRun(SMALL, guess=0.5)
    yield made
    made.close()


def test_a_double_click_on_run_starts_one_run(panel, monkeypatch):
    started = []
    monkeypatch.setattr(Training, "start", lambda self, _: (started.append(self), setattr(self, "state", "running")))
    panel.run_button.click()
    panel.run_button.click()
    assert len(started) == 1 and panel.training is started[0]
    assert panel.run_button.disabled and not panel.stop_button.disabled
    started[0].state = "stopped"
    panel.run_button.click()
    assert len(started) == 2


def test_run_trains_on_another_thread_and_shows_the_end(panel):
    threads = set()
    panel.html.observe(lambda _: threads.add(threading.get_ident()), "value")
    panel.run_button.click()
    panel.training.wait()
    assert threads - {threading.get_ident()}
    assert (panel.progress.value, panel.progress.max) == (3, 3)
    assert panel.progress_text.value == "finished at iteration 3 of 3"
    assert not panel.run_button.disabled and panel.stop_button.disabled
    assert f"Iteration 3: greedy accuracy <b>{panel.training.accuracy}</b>" in panel.html.value


def test_stop_before_anything_ran_does_nothing(panel):
    panel.stop_button.click()
    assert panel.training is None and panel.progress_text.value == "press Run"


def test_result_waits_for_the_run_that_was_started(panel):
    panel.run_button.click()
    started = panel.training
    assert panel.result() is started and started.state == "finished"
    assert panel.result() is started


def test_result_trains_where_there_is_no_whole_run(panel):
    first = panel.result()
    assert first.state == "finished"
    first.state = "stopped"
    second = panel.result()
    assert second is not first and second.state == "finished"
    assert without_seconds(first.history.rows) == without_seconds(second.history.rows)


def test_the_panel_moves_while_result_trains(panel):
    seen = []
    panel.progress.observe(lambda change: seen.append(change["new"]), "value")
    panel.result()
    assert seen[-1] == 3 and seen == sorted(seen)


def test_updates_leave_the_training_room(monkeypatch):
    """With a clock of our own: no two pictures within 0.2 s, nor within five times what drawing one takes."""
    clock, drawn = [100.0], []

    class Slow(TrainingPanel):
        def view(self):
            clock[0] += 0.1
            drawn.append(clock[0])
            return ""

    monkeypatch.setattr(live_run.time, "monotonic", lambda: clock[0])
    panel = Slow([], [], height=10)
    panel.training = Training(SMALL)
    panel.training.state = "running"
    drawn.clear()
    for _ in range(100):
        clock[0] += 0.02
        panel._changed()
    gaps = [b - a for a, b in pairwise(drawn)]
    assert drawn and min(gaps) >= 0.5
    panel.training.state = "finished"
    count = len(drawn)
    panel._changed()
    assert len(drawn) == count + 1, "the end is always shown"
    panel.close()


def test_a_closed_panel_stops_training_and_stays_silent():
    panel = LiveRun(GRPOConfig(prompts_per_iteration=4, group_size=4, iterations=1000, evaluate_every=1000))
    panel.run_button.click()
    training = panel.training
    panel.close()
    shown = panel.html.value
    training.wait()
    assert training.state == "stopped" and panel.html.value == shown
    panel.run()
    assert panel.training is training


def test_picture_shows_this_run_the_reference_and_the_guess(panel, monkeypatch):
    figures = []

    def draw_only(draw, alt, size):
        figures.append(Figure(figsize=size))
        draw(figures[-1])
        return f'<img alt="{html.escape(alt)}">'

    monkeypatch.setattr(live_run, "figure_html", draw_only)
    training = panel.result()
    panel.view()
    accuracy, kl = figures[-1].axes
    lines = {line.get_label(): line for line in accuracy.lines}
    assert list(lines["this run, 95 % band"].get_ydata()) == [row["accuracy"] for row in training.history.rows]
    assert list(lines["reference run"].get_ydata()) == list(REFERENCE.values())
    assert set(lines["your guess"].get_ydata()) == {0.5}
    assert list(kl.lines[-1].get_xdata()) == [1, 2, 3] and kl.lines[-1].get_ydata()[0] == 0
    assert str(training.accuracy) in panel.view()


def test_the_saved_page_tells_what_to_do_before_any_run(panel):
    saved = panel._repr_mimebundle_()[0]["text/html"]
    assert "Press <b>Run</b>" in saved and "3 iterations of 4 prompts × 4 completions" in saved
    assert re.search(r'<img alt="[^"]*no run yet', saved)


def test_a_problem_is_shown_in_words_and_escaped(panel):
    panel.training = Training(SMALL)
    panel.training.state, panel.training.problem = "failed", "<script>"
    panel.refresh()
    assert "&lt;script&gt;" in panel.html.value and "<script>" not in panel.html.value


def test_group_table_is_the_worked_group():
    group = Group("24+48=", "72", ("74;", "72;", "<b>", "74;"), (0.0, 1.0, 0.0, 0.0))
    header, *rows = re.findall("<tr>(.*?)</tr>", group_table(group))
    assert re.findall("<th>(.*?)</th>", header)[1:] == ["24+48=", "74;", "72;", "&lt;b&gt;", "74;"]
    cells = [re.findall("<span>(.*?)</span>", row) for row in rows]
    assert cells == [["reward", "0", "1", "0", "0"], ["advantage", "−0.577", "+1.732", "−0.577", "−0.577"]]
