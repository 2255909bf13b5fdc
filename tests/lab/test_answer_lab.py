"""AnswerLab: each grader says what its rule says, and who is wrong is told only where it is known what is right."""

import html
import re
import threading

import pytest

from grpo_core.lab import answer_lab
from grpo_core.lab.answer_lab import EXAMPLES, GRADERS, AnswerLab, Example, busy, grader_table, in_words, last_number, verdicts

OURS = "is_right (ours)"


@pytest.fixture
def lab():
    made = AnswerLab()
    yield made
    made.close()


def cells(shown):
    found = [re.findall("<td><(?:span|b)>(.*?)</(?:span|b)></td>", row) for row in re.findall("<tr>(.*?)</tr>", shown)[1:]]
    return [[html.unescape(cell) for cell in row] for row in found]


@pytest.mark.parametrize(
    ("completion", "answer", "same", "anywhere", "last"),
    [
        ("72", "72", True, True, True),
        ("#### 72", "72", False, True, True),
        ("172", "72", False, True, False),
        ("72 of 100", "72", False, True, False),
        ("1,234", "1234", False, False, False),
        ("#### 1,234", "1,234", False, True, True),
        ("is 72.", "72", False, True, True),
        ("is -5", "5", False, True, False),
        ("is -5", "-5", False, True, True),
        ("1/2", "1/2", True, True, True),
        ("no idea", "72", False, False, False),
        ("", "", True, True, False),
    ],
)
def test_naive_graders_follow_their_rules(completion, answer, same, anywhere, last):
    said = verdicts(completion, answer)
    assert (said["same text"], said["anywhere in the text"], said["last number, as text"]) == (same, anywhere, last)


def test_examples_show_each_grader_both_right_and_wrong_and_both_kinds_of_mistakes():
    table = grader_table()
    assert len(table) == len(EXAMPLES) + 1
    for grader in GRADERS:
        column = table[grader][:-1]
        assert column.str.startswith("✗").sum() == int(table[grader].iloc[-1]) > 0
        for verdict, example in zip(column, EXAMPLES):
            pays = verdict.endswith("pays")
            assert verdict.startswith("✗") == (pays != example.right)
    assert {"✗ pays", "✗ refuses"} <= set(table[list(GRADERS)].to_numpy().ravel())
    naive = ["same text", "anywhere in the text", "last number, as text"]
    assert int(table[OURS].iloc[-1]) < table[naive].iloc[-1].astype(int).min()


def test_each_example_is_judged_in_words(lab):
    for i, example in enumerate(EXAMPLES):
        lab.example.value = i
        assert (lab.completion.value, lab.answer.value, lab.right) == example
        wrong = []
        for name, verdict, judged in cells(lab.html.value):
            pays = GRADERS[name](*example[:2])
            assert verdict == ("pays" if pays else "refuses")
            assert judged.startswith("✓" if pays == example.right else "✗ a mistake: the answer is ")
            assert judged.startswith("✓") or judged.endswith("right" if example.right else "wrong")
            wrong += [f"“{name}”"] * (pays != example.right)
        sentence = html.unescape(lab.html.value.split("</b>. ")[1].split("</p>")[0])
        assert all(name in sentence for name in wrong) and sentence.count("“") == len(wrong)
        assert ("refuses a right answer" in sentence) == (bool(wrong) and example.right)
        assert (sentence == "Nobody is wrong.") == (not wrong)


def test_typing_takes_the_truth_back_until_somebody_says_it(lab):
    lab.example.value = 3
    assert lab.truth.value == "wrong"
    lab.completion.value = "#### -1,072"
    assert lab.truth.value == "not said" and lab.right is None
    assert "is_right reads <b>−1072</b>. It is paid by “anywhere in the text”. Read the completion" in lab.html.value
    assert {row[2] for row in cells(lab.html.value)} == {"–"}
    lab.answer.value = "73"
    assert "It is paid by nobody. Read the completion: is it right?" in lab.html.value
    lab.answer.value = "072"
    lab.truth.value = "wrong"
    assert "Wrong is who pays a wrong answer: “anywhere in the text”." in lab.html.value
    lab.example.value = 1
    assert lab.truth.value == "right" and "Nobody is wrong." in lab.html.value


def test_an_unreadable_answer_is_said_to_be_so(lab):
    lab.completion.value = "#### 72 or 73"
    assert "is_right reads <b>no number for certain</b>" in lab.html.value


def test_typed_text_cannot_become_markup(lab):
    lab.completion.value, lab.answer.value = "<img src=x>", "<b>"
    assert "<img" not in lab.html.value
    shown = AnswerLab([Example("<img src=x>\n#### 7", "<i>", False)])
    assert "<img" not in shown.static() and "&lt;i&gt;" in shown.static()
    shown.close()


def test_math_verify_answers_in_any_thread_without_a_word_on_stderr(capfd):
    pytest.importorskip("math_verify")
    said = []
    thread = threading.Thread(target=lambda: said.append(answer_lab.math_verify(r"\boxed{\frac{3}{4}}", "0.75")))
    thread.start()
    thread.join()
    assert said == [True] and answer_lab.math_verify("#### 71", "72") is False
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["9^9^9", "9^{9^{9}}", "9**9**9", "((9!)!)!", "9^99999", "1" * 3000])
def test_what_could_take_for_ever_is_not_asked(text):
    pytest.importorskip("math_verify")
    assert busy(text) and answer_lab.math_verify(text, "72") is None and answer_lab.math_verify("72", text) is None
    assert in_words(None, True) == in_words(None, False) == "not asked"


def test_not_asked_is_no_mistake(lab):
    pytest.importorskip("math_verify")
    lab.completion.value, lab.truth.value = "#### 9^9^9", "wrong"
    assert ["math-verify", "not asked", "–"] in cells(lab.html.value)
    assert "Nobody is wrong." in lab.html.value


def test_without_the_library_the_other_graders_are_there(monkeypatch):
    monkeypatch.delitem(GRADERS, "math-verify", raising=False)
    assert len(verdicts("#### 72", "72")) == 4
    lab = AnswerLab()
    assert len(cells(lab.html.value)) == 4
    lab.close()


def test_the_saved_page_has_all_examples_and_counts_the_mistakes(lab):
    rows = cells(lab._repr_mimebundle_()[0]["text/html"])
    assert rows == grader_table().to_numpy().tolist()
    assert rows[0][0] == "24 + 48 = 72 ⏎ #### 72" and rows[-1][0] == "mistakes"


def test_own_examples_may_be_plain_tuples(lab):
    own = AnswerLab([("", "72", False), ("line\n7", "7", True)])
    assert [name for name, _ in own.example.options] == ["1. (empty)", "2. 7"]
    own.close()
    with pytest.raises(ValueError, match="at least one Example"):
        AnswerLab([])


def test_last_number_takes_no_trailing_period():
    assert last_number("It is 72.", "72") and not last_number("It is 7.2.", "72")
