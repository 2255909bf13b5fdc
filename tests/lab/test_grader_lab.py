"""GraderLab: any grader may be tried; what goes wrong in it is said in words, and the panel goes on."""

import contextlib
import html
import re
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from grpo_core import Addition, GRPOConfig, greedy_accuracy, train, warm_start
from grpo_core.lab import grader_lab, panel
from grpo_core.lab.grader_lab import GraderError, GraderLab, GraderTraining, as_reward, number, within
from grpo_core.lab.live_run import curve
from grpo_core.sloppy_grader import HedgedAddition, sloppy_grader, sloppy_start

SMALL = GRPOConfig(prompts_per_iteration=4, group_size=4, iterations=2)
LONG = GRPOConfig(prompts_per_iteration=4, group_size=4, iterations=1000)


@pytest.fixture(autouse=True)
def drawings(monkeypatch):
    """Pictures are kept as functions: drawing each one would take most of the time of these tests."""
    kept = []
    monkeypatch.setattr(
        grader_lab, "figure_html", lambda draw, alt, size: kept.append(draw) or f'<img alt="{html.escape(alt)}">'
    )
    return kept


def axes_of(drawing):
    figure = Figure()
    drawing(figure)
    return figure.axes


class Sums(Addition):
    """Sums that a grader pays for."""

    def __init__(self, grader):
        super().__init__()
        self.verify, self.held_out = grader, self.held_out[:40]

    def true_reward(self, completion, answer):
        return float(completion == f"{answer};")


def exact(completion, answer):
    return completion == f"{answer};"


@pytest.fixture(scope="module")
def start():
    return warm_start()


@pytest.fixture
def lab(start):
    """Make a lab with a grader; all are closed at the end."""
    made = []

    def make(grader=exact, config=SMALL):
        made.append(GraderLab(grader, Sums, start, config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def table(shown):
    rows = re.findall("<tr>(.*?)</tr>", shown)
    return [[html.unescape(cell) for cell in re.findall("<td><span>(.*?)</span></td>", row)] for row in rows[1:]]


def test_with_the_exact_grader_it_is_the_run_of_the_core(task, start, lab):
    plain, policy = [], warm_start()
    train(Sums(task.verify), policy, SMALL, on_iteration=lambda row, _: plain.append(row))
    training = lab().result()
    assert training.status == "finished at iteration 2 of 2"
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), training.policy.parameters()))
    assert [row["accuracy"] for row in training.history.rows] == [row["accuracy"] for row in plain]
    assert curve(training.history.rows, "reward") == curve(training.history.rows, "true") != ([], [])


def test_the_start_policy_is_never_changed(start, lab):
    before = [weight.clone() for weight in start.parameters()]
    training = lab().result()
    assert all(torch.equal(a, b) for a, b in zip(before, start.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(before, training.policy.parameters()))


@pytest.mark.parametrize("pay", [5.0, -1.0, 0.25])
def test_a_grader_may_pay_any_number_and_the_truth_is_measured_all_the_same(start, lab, pay):
    """Paid for everything alike, nothing is learned without a leash; accuracy and `true` know nothing of the pay."""
    training = lab(lambda completion, answer: pay, replace(SMALL, beta=0)).result()
    assert training.state == "finished" and curve(training.history.rows, "reward") == ([1, 2], [pay, pay])
    assert training.accuracy == greedy_accuracy(start, Addition(), Addition().held_out[:40])
    assert all(0 <= value <= 1 for value in curve(training.history.rows, "true")[1])


def test_true_is_the_mean_of_the_samples_that_were_paid(start):
    """A grader that pays 1 for wrong answers: pay and truth of the same samples add up to 1."""

    def wrong(completion, answer):
        return not exact(completion, answer)

    rows = GraderTraining(SMALL, start, Sums(wrong), wrong).run().history.rows
    assert "true" not in rows[0] and len(rows) == 3
    assert all(row["reward"] + row["true"] == pytest.approx(1) for row in rows[1:])
    assert any(0 < row["true"] < 1 for row in rows[1:])


def raises(completion, answer):
    return {"72": 1}[completion]


def exits(completion, answer):
    sys.exit("done")


def loops(completion, answer):
    while True:
        with contextlib.suppress(Exception):
            pass


def leaves(completion, answer):
    raise BaseException("not even an Exception")


def sleeps(completion, answer):
    time.sleep(0.1)
    return 1.0


BAD = {
    "raised KeyError": raises,
    "raised SystemExit (done)": exits,
    "raised TypeError": lambda completion: 1.0,
    "raised RecursionError": lambda completion, answer: (f := lambda x: f(x))(0),
    "raised FloatingPointError": lambda completion, answer: (_ for _ in ()).throw(FloatingPointError("mine")),
    "returned nothing (is a return missing?)": lambda completion, answer: None,
    "returned nan, not a number": lambda completion, answer: float("nan"),
    "returned inf, not a number": lambda completion, answer: float("inf"),
    "returned -1e+39, not a number": lambda completion, answer: -1e39,
    "returned '1', not a number": lambda completion, answer: "1",
    "returned Ellipsis, not a number": lambda completion, answer: ...,
    "returned [1.0], not a number": lambda completion, answer: [1.0],
    "raised BaseException (not even an Exception)": leaves,
    "raised ValueError (xxx": lambda completion, answer: (_ for _ in ()).throw(ValueError("x" * 10**6)),
    "ran for more than 0.05 seconds": loops,
    "ran for more than 0.05 seconds (": sleeps,
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_grader_ends_the_run_and_says_why_and_on_what(lab, monkeypatch, said):
    monkeypatch.setattr(grader_lab, "MOST_SECONDS", 0.05 if BAD[said] in (loops, sleeps) else 60)
    panel = lab(BAD[said])
    panel.run_button.click()
    panel.training.wait()
    assert panel.training.state == "failed" and "your grader " + said in panel.training.problem
    completion, answer = re.search(r"on the completion '(.*)' with the answer '(\d+)'", panel.training.problem).groups()
    assert set(completion) <= set(Addition.vocab) and answer == "72"
    assert html.escape("your grader " + said) in panel.html.value and len(panel.training.problem) < 1000
    assert panel.progress_text.value == "failed at iteration 0 of 2"
    assert not panel.run_button.disabled and panel.stop_button.disabled


def test_stop_does_not_wait_for_a_slow_grader(lab):
    calls = []

    def stops(completion, answer):
        calls.append(completion)
        panel.stop_button.click()
        return exact(completion, answer)

    panel = lab(stops)
    panel.run_button.click()
    panel.training.wait()
    assert panel.training.state == "stopped" and len(calls) == 1 and not panel.run_button.disabled


def test_after_a_bad_grader_run_works_again(lab):
    broken = [True]
    panel = lab(lambda completion, answer: 1 / 0 if broken else exact(completion, answer))
    assert panel.result().state == "failed" and "ZeroDivisionError" in panel.html.value
    broken.clear()
    panel.run_button.click()
    panel.training.wait()
    assert panel.training.state == "finished" and "ZeroDivisionError" not in panel.html.value


def test_a_grader_that_fails_late_keeps_the_curve_so_far(lab):
    calls = []

    def tires(completion, answer):
        calls.append(completion)
        if len(calls) > 25:  # 4 for the example of row 0, 16 in iteration 1, 16 in iteration 2.
            raise ValueError("<b>tired</b>")
        return exact(completion, answer)

    panel = lab(tires)
    training = panel.result()
    assert training.state == "failed" and [row["iteration"] for row in training.history.rows] == [0, 1]
    assert "&lt;b&gt;tired&lt;/b&gt;" in panel.html.value and "<b>tired" not in panel.html.value
    assert "Iteration 1: greedy accuracy" in panel.html.value


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.bool_(True), torch.tensor(1.0), torch.tensor([1])])
def test_what_can_be_read_as_a_number_is_a_reward(value):
    assert as_reward(value) == 1.0 and type(as_reward(value)) is float


@pytest.mark.parametrize("value", [None, "1", b"1", 1j, [], (), object(), torch.zeros(2), 10**400, 1.1e6, -1.1e6])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(GraderError, match="returned"):
        as_reward(value)


def test_a_long_answer_does_not_flood_the_panel():
    with pytest.raises(GraderError) as error:
        as_reward("no" * 10000)
    assert len(str(error.value)) < 200


def test_within_gives_the_result_and_the_former_tracer_back():
    seen = []

    def tracer(frame, event, argument):
        seen.append(event)

    former = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert within(60, lambda a, b: a + b, 1, 2) == 3
        with pytest.raises(GraderError, match="ran for more than 0 seconds"):
            within(0, loops, "", "")
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(former)


def test_a_grader_cannot_catch_its_own_timeout():
    def stubborn():
        try:
            loops("", "")
        except Exception:
            return 1.0

    with pytest.raises(GraderError, match="does a loop never end"):
        within(0.05, stubborn)


def test_run_trains_on_another_thread_and_shows_both_rewards(lab):
    panel, threads = lab(lambda completion, answer: completion.endswith(";")), set()
    panel.html.observe(lambda _: threads.add(threading.get_ident()), "value")
    panel.run_button.click()
    panel.training.wait()
    assert threads - {threading.get_ident()} and panel.progress.value == 2
    last = panel.training.history.rows[-1]
    assert f"Your grader pays {last['reward']:.2f} a sample; {last['true']:.2f} of them are truly right." in panel.html.value
    assert f"at the end {last['reward']:.2f} is paid, and {last['true']:.2f} are truly right" in panel.html.value


def test_completions_of_the_example_have_both_verdicts(lab):
    panel = lab(lambda completion, answer: -2)
    group = panel.result().groups[-1]
    assert "<code>24+48=</code> (true answer 72)" in panel.html.value
    assert table(panel.html.value) == [
        [text, "pays −2", "✓ right", "◀ right, but not paid"] if text == "72;" else [text, "pays −2", "✗ wrong", ""]
        for text in group.texts
    ]
    assert "72;" in group.texts


def test_the_sloppy_grader_of_the_notebook():
    """The task checks its grader, too; the reader is told once, not twice. The exact grader's accuracy is the true one."""
    policy, config = sloppy_start(), replace(SMALL, max_new_tokens=16)
    lab = GraderLab(sloppy_grader, HedgedAddition, policy, config)
    training = lab.result()
    assert training.state == "finished", training.problem
    assert training.history.rows[0]["accuracy"] == greedy_accuracy(policy, HedgedAddition(exact), HedgedAddition().held_out)
    assert all(row["true"] <= row["reward"] for row in training.history.rows[1:])
    lab = GraderLab(raises, HedgedAddition, policy, config)
    assert lab.result().problem.count("raised") == lab.training.problem.count("on the completion") == 1
    lab.close()


@pytest.mark.parametrize("grader", ["exact", None, 1.0])
def test_what_is_no_function_is_refused_at_once(start, grader):
    with pytest.raises(ValueError, match="grader must be a function of a completion and the true answer"):
        GraderLab(grader, Sums, start)


def test_stop_ends_the_run_and_result_trains_a_whole_one(lab):
    panel = lab(config=LONG)
    panel.run_button.click()
    panel.stop_button.click()
    panel.training.wait()
    assert panel.training.state == "stopped" and not panel.run_button.disabled
    panel.config = SMALL
    assert panel.result().state == "finished"


def test_a_new_lab_stops_the_run_of_the_old_one(lab):
    old = lab(config=LONG)
    old.run_button.click()
    lab()
    old.training.wait()
    assert old.training.state == "stopped"


def test_a_closed_lab_stops_and_stays_silent(lab):
    panel = lab(config=LONG)
    panel.run_button.click()
    panel.close()
    panel.training.wait()
    assert panel.training.state == "stopped"


@pytest.mark.parametrize("pay", [7, -2])
def test_the_picture_has_both_curves_and_an_axis_for_any_pay(lab, drawings, pay):
    panel = lab(lambda completion, answer: pay)
    panel.view()
    assert axes_of(drawings[-1])[0].get_ylim() == (0, 1.2)
    rows = panel.result().history.rows
    rewards, kl = axes_of(drawings[-1])
    lines = {line.get_label(): line for line in rewards.lines}
    for label, column in (("the grader pays", "reward"), ("truly right", "true")):
        assert [list(data) for data in lines[label].get_data()] == list(curve(rows, column))
    low, high = rewards.get_ylim()
    assert low <= min(pay, 0) and high >= max(pay, 1)
    assert list(kl.lines[-1].get_ydata()) == [row["kl"] for row in rows[1:]]


def test_the_picture_is_a_picture(lab, monkeypatch):
    monkeypatch.setattr(grader_lab, "figure_html", panel.figure_html)
    made = lab()
    assert re.search(r'<img alt="Left: [^"]+" width="826" height="\d+" src="data:image/png;base64,\w+', made.html.value)


def test_the_saved_page_tells_what_to_do_before_any_run(lab):
    saved = lab()._repr_mimebundle_()[0]["text/html"]
    assert "2 iterations of 4 prompts × 4 completions" in saved and "Press <b>Run</b>" in saved
    assert re.search(r'<img alt="[^"]*no run yet', saved)


def test_numbers_have_a_real_minus():
    assert number(-0.5) == "−0.50" and number(0.5) == "0.50"
