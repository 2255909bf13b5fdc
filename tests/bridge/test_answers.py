r"""The verifier of final answers: a table of what language models write, right and wrong, and properties over any text."""

import logging
import signal
import sys
import threading
from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_core.bridge import answers
from grpo_core.bridge.answers import final_answer, is_right

NATALIA = (
    "Natalia's shop sold 48 clips in April and 48/2 = <<48/2=24>>24 clips in May.\n48 + 24 = <<48+24=72>>72 clips in total.\n"
)
TABLE = {  # Completion, true answer, right or wrong.
    "GSM8K's own mark": [
        (NATALIA + "#### 72", "72", True),
        (NATALIA + "#### 72", NATALIA + "#### 72", True),
        (NATALIA + "#### 48", NATALIA + "#### 72", False),
        ("####72", "72", True),
        ("####\n72", "72", True),
        ("#### 72.", "72", True),
        ("#### **72**", "72", True),
        ("#### 72 ####", "72", True),
        ("#### 72<|im_end|>", "72", True),
        ("#### 72\n\nI hope that these 3 steps help.", "72", True),
        ("#### 71\nWait, that is not right.\n#### 72", "72", True),
        ("#### 71\nWait, that is not right.\n#### 72", "71", False),
        ("#### Step 3: add\n24 + 48 = 72. The answer is 72.", "72", True),
        ("#### 3. Add them up\nThe answer is 72.", "72", True),
        ("24 + 48 = 72\n#### unknown", "72", False),
        ("#### 172", "72", False),
        ("#### 7", "72", False),
        ("#### 24 + 48 = 72", "72", True),
        ("#### 72. Check: 70 = 72 - 2", "72", True),
        ("#### x = 72 clips", "72", True),
        ("#### => 72", "72", True),
        ("#### No. 12", "12", True),
        ("#### 12\n#### 12", "12", True),
    ],
    "boxes": [
        (r"So the answer is $\boxed{72}$.", "72", True),
        (r"\[\boxed{72}\] There were 3 boxes.", "72", True),
        (r"\boxed{72", "72", True),
        (r"\boxed 72", "72", True),
        (r"\fbox{72}", "72", True),
        (r"\boxed{72\%}", "72", True),
        (r"\boxed{\$1,234}", "1234", True),
        (r"\boxed{-\$5}", "-5", True),
        (r"\boxed{\text{72 apples}}", "72", True),
        (r"\boxed{72 \text{ cm}^2}", "72", True),
        (r"\boxed{\text{There are } 72 \text{ clips in } 3 \text{ boxes}}", "72", True),
        (r"\boxed{\mathbf{{{72}}}}", "72", True),
        (r"\boxed{\left(72\right)}", "72", True),
        (r"\boxed{72^\circ}", "72", True),
        (r"\boxed{5 + 3 = 8}", "8", True),
        (r"\boxed{5 + 3 = 8}", "5", False),
        (r"I will put it into \boxed{}. The answer is 72.", "72", True),
        (r"\boxed{71} is wrong: I forgot one. \boxed{72}", "72", True),
        (r"\boxed{71} is wrong: I forgot one. \boxed{72}", "71", False),
        (r"#### 71. No, I forgot one: \boxed{72}", "72", True),
        (r"\boxed{71} but then #### 72", "72", True),
        (r"\boxed{\text{unknown}} 72", "72", False),
        (r"\boxed{\pi} is not 3", "3", False),
    ],
    "fractions, decimals, large numbers": [
        (r"\boxed{\frac{3}{4}}", "0.75", True),
        (r"\boxed{-\dfrac34}", "-3/4", True),
        (r"\boxed{3\frac{1}{2}}", "3.5", True),
        ("#### 3 1/2", "3.5", True),
        ("#### 3½ cups", "3.5", True),
        ("#### -½", "-0.5", True),
        ("#### 2 / 4", "1/2", True),
        ("#### .5", "0.5", True),
        ("#### 0.333", "1/3", False),
        ("#### 72.00", "72", True),
        ("#### 72.01", "72", False),
        ("#### 1,234", "1234", True),
        ("#### 1234", "1,234", True),
        ("#### 1 234", "1234", True),
        ("#### 1'234'567", "1234567", True),
        (r"\boxed{1{,}234}", "1234", True),
        (r"\boxed{1\,234.5}", "1234.5", True),
        ("#### 1.234,56", "1234.56", False),
        ("#### 1.234,56", "1.234", False),
        ("#### 12,34", "1234", False),
        ("#### 0,5", "5", False),
        ("#### 1e3", "1000", True),
        (r"\boxed{1.5 \times 10^{3}}", "1500", True),
        ("#### 1.5 million", "1500000", True),
        ("#### $72k", "72000", True),
        ("#### $72k", "72", False),
        ("#### 3 and a half", "3", False),
        ("#### 1/0", "0", False),
        ("#### nan", "0", False),
        ("#### " + "9" * 100_000, "9", False),
        ("#### 1e999999999", "1", False),
        ("#### 5 and 1/2", "5.5", True),
    ],
    "signs": [
        ("#### -5", "-5", True),
        ("#### −5", "-5", True),
        ("#### -5", "5", False),
        ("A: -5", "-5", True),
        ("The answer is negative 5.", "-5", True),
        ("The answer is negative 5.", "5", False),
        ("Answer:\n- 5", "5", True),  # A bullet.
        ("The loss is $-5.", "-5", True),
        ("The loss is -5.", "-5", True),
        ("The loss is -5.", "5", False),
        ("#### x -5", "5", False),
        ("In grade-5 she has 48-24 = 24 cups", "24", True),
    ],
    "currencies and units": [
        ("#### $72.00", "72", True),
        ("#### 72 €", "72", True),
        ("#### £72", "72", True),
        ("It costs US$72.", "72", True),
        ("It costs Rs. 72 in all", "72", True),
        ("#### 72%", "72", True),
        ("#### 72 percent", "72", True),
        ("#### 0.72", "72", False),
        ("#### 72km", "72", True),
        ("#### 72 km/h", "72", True),
        ("#### 72 m^2", "72", True),
        ("The area is 72 m².", "72", True),
        ("The area is 72 m2.", "72", True),
        ("#### 5pm", "5", True),
        ("#### 72nd", "72", True),
        ("#### 6 hours = 360 minutes", "360", True),
        ("#### 18 dollars and 0 cents", "18", True),
    ],
    "said in words": [
        ("The answer is 72.", "72", True),
        ("The final answer is: **$72**", "72", True),
        ("**Answer:** 72 apples", "72", True),
        ("**Final Answer**\n\nAnswer: \\(72\\)", "72", True),
        ("<answer>72</answer> in 3 steps", "72", True),
        ('{"answer": 72, "steps": 3}', "72", True),
        ("The answer is 72! I added 24 and 48.", "72", True),
        ("The answer is 72 because 3 boxes hold 24 each.", "72", True),
        ("The answer to your question is 72 clips in 3 boxes.", "72", True),
        ("The answer is about 72.", "72", True),
        ("The answer is 71. Wait. The answer is 72.", "72", True),
        ("The answer is 72, not 73.", "72", True),
        ("The answer is not 72.", "72", False),
        ("Answer: 48/2 = 24 clips in May. 48 + 24 = 72 clips in all.", "72", True),
        ("Answer: 1. She has 24.\n2. She gets 48.\nThat makes 72.", "72", True),
        ("Answer: 24 + 48", "48", False),
        ("The answer is seventy-two", "72", False),
        ("Not 72 but 73", "73", True),
        ("There are 18 dollars, not 20.", "18", True),
        ("So he pays 72 and not 73.", "72", True),
        ("The answer is 20% of 50, which is 10.", "20", False),
        ("The answer is 18 dollars more than 36 dollars, or 54 dollars.", "18", False),
        ("She made 18 dollars more than last week.", "18", True),
        ("Answer: 48 clips in April. So 72.", "48", False),
        ("The answer is 18. So she earns 18 dollars in 2 days.", "18", True),
    ],
    "no mark: the last number": [
        ("72", "72", True),
        ("24 + 48 = 72", "72", True),
        ("24 and 48 make 72", "72", True),
        ("So she sold 72 clips.", "72", True),
        ("First 24, then 48.\nIn all 72", "72", True),
        ("72 is 24 + 48", "72", False),
        ("No idea.", "72", False),
        ("", "72", False),
        ("####", "72", False),
        (r"\boxed{}", "72", False),
        ("\x00\ud800 72", "72", True),
        ("７２", "72", True),
        ("#### ٧٢", "72", True),
        ("Total: 72 (48 + 24)", "72", True),
        ("4 + 4 = 8 apples (that is 2 more than before).", "8", True),
        ("24 is a third of 3 times (24 + 48)", "3", False),
    ],
    "hedges": [
        *(
            (f"#### {hedge}", gold, False)
            for hedge in ("72 or 73", "72, 73", "72 and 73", "72-73", "72 73")
            for gold in ("72", "73")
        ),
        (r"\boxed{72, 73}", "73", False),
        (r"\boxed{72} or \boxed{73}", "73", False),
        (r"$\boxed{72}$, $\boxed{73}$", "73", False),
        ("#### 72 or #### 73", "73", False),
        (r"\boxed{x = 72, y = 73}", "73", False),
        ("The answer is 72 or 73.", "72", False),
        ("The answer is either 72 or 73.", "73", False),
        ("It is 72 or 73", "73", False),
        ("#### 72 (or 73)", "72", False),
        ("#### 72 or it might be 73", "72", False),
        ("It is 72 clips or 73.", "73", False),
        ("#### 72 apples, 3 pears", "72", False),
        ("#### 5 feet 3 inches", "5", False),
        ("#### 72 or 72.0", "72", True),
        ("#### 72 out of 100", "72", True),
        ("#### 72 out of 100", "100", False),
        ("#### 72 (that is 3 boxes of 24)", "72", True),
        ("#### 72 (3 × 24)", "72", True),
        ("The answer is 72. Or 73.", "72", False),
        ("#### 72! Or 73", "72", False),
        ("#### 72 (maybe 73)", "72", False),
        ("#### 72 (alternatively 73)", "72", False),
        ("#### 72 (73)", "72", False),
        ("72\nor\n#### 73", "73", False),
        ("It is 72 or maybe it is 73.", "73", False),
        (r"\boxed{18}\text{ and also }\boxed{19}", "19", False),
        ("#### 72 where 73 is also possible", "72", False),
        ("It's 72 but could be 73", "73", False),
    ],
    "denied or bounded": [
        ("#### NOT 72", "72", False),
        ("#### no 72", "72", False),
        ("#### more than 72", "72", False),
        ("#### less than 72", "72", False),
        ("The answer is at least 18", "18", False),
        ("The answer is more than 72", "72", False),
        ("It can't be 72.", "72", False),
        ("The answer cannot be 72", "72", False),
    ],
    "no single number": [
        ("#### 5:30", "5", False),
        ("#### 5:30", "30", False),
        ("#### 12/25/2024", "2024", False),
        ("#### 2024-01-05", "2024", False),
        ("#### x > 72", "72", False),
        (r"\boxed{2x}", "2", False),
    ],
    "expressions, by math-verify": [
        (r"\boxed{6^2 \cdot 2}", "72", True),
        (r"#### \sqrt{5184}", "72", True),
        ("#### 6 x 12", "72", True),
        (r"\boxed{\frac{1 + 1}{6}}", "1/3", True),
        ("#### 3 * 19.99", "59.97", True),
        ("#### 2**3", "8", True),
        ("#### 2**3", "23", False),
        (r"\boxed{2^3}", "2", False),
        (r"\boxed{6²}", "62", False),
        ("#### 24 + 48", "24", False),
        (r"\boxed{\sqrt{2}}", "2", False),
        (r"\boxed{2^{9999999}}", "2", False),
        (r"\boxed{9^{9^{9}}}", "9", False),
        (r"\boxed{10\pi}", "10", False),
    ],
}
ROWS = [row for rows in TABLE.values() for row in rows]
PARAMETERS = [
    pytest.param(*row, id=f"{group}: {row[0][-30:]!a} for {row[1][-8:]}") for group, rows in TABLE.items() for row in rows
]


@pytest.fixture(autouse=True)
def where_it_is_installed(request):
    if "by math-verify" in request.node.name:
        pytest.importorskip("math_verify")


@pytest.mark.parametrize("completion, answer, right", PARAMETERS)
def test_pays_what_is_right_and_nothing_else(completion, answer, right):
    assert is_right(completion, answer) is right


def test_table_is_large_and_has_both_signs():
    assert len(ROWS) == len(set(ROWS)) >= 100
    assert sum(right for *_, right in ROWS) >= 50 and sum(not right for *_, right in ROWS) >= 50


def test_string_comparison_pays_wrong_answers_and_refuses_right_ones():
    """What people write first. Each of them fails on a third of the table or so; none is right on both signs."""
    naive = {
        "equal": lambda completion, answer: completion.rpartition("####")[2].strip() == answer,
        "contained": lambda completion, answer: answer in completion,
        "ends with": lambda completion, answer: completion.rstrip(".").endswith(answer),
    }
    paid, refused = {}, {}
    for name, compare in naive.items():
        paid[name] = sum(compare(completion, answer) and not right for completion, answer, right in ROWS)
        refused[name] = sum(right and not compare(completion, answer) for completion, answer, right in ROWS)
    assert refused["equal"] > 60 and paid["contained"] > 40 and paid["ends with"] > 15 and refused["ends with"] > 40
    assert naive["ends with"]("#### 172", "72") and naive["contained"]("#### 172", "72") and not is_right("#### 172", "72")


OTHERWISE = {  # What math-verify reads in another way, and we on purpose in ours.
    *("24 + 48 = 72\n#### unknown", r"\boxed{72", r"\fbox{72}", r"\boxed{\text{72 apples}}", r"\boxed{\mathbf{{{72}}}}"),
    *("#### 3 1/2", "#### 3½ cups", "#### -½", "#### 1'234'567", r"\boxed{1\,234.5}", "#### 1.234,56", "#### 1e3"),
    *(
        "#### 1.5 million",
        "#### $72k",
        "#### 3 and a half",
        "#### 1e999999999",
        "#### −5",
        "It costs US$72.",
        "７２",
        "#### ٧٢",
    ),
    *("The answer is negative 5.", "The answer is not 72.", "72 is 24 + 48", "<answer>72</answer> in 3 steps"),
    *(r"#### \sqrt{5184}", "#### 6 x 12", r"\boxed{71} but then #### 72", "#### x -5", "#### 72. Check: 70 = 72 - 2"),
    r"\boxed{\text{There are } 72 \text{ clips in } 3 \text{ boxes}}",
    "Answer: 1. She has 24.\n2. She gets 48.\nThat makes 72.",
    *("#### 5 and 1/2", "There are 18 dollars, not 20.", "So he pays 72 and not 73.", "Answer: 48 clips in April. So 72."),
    *("The answer is 20% of 50, which is 10.", "The answer is 18 dollars more than 36 dollars, or 54 dollars."),
    *("Total: 72 (48 + 24)", "4 + 4 = 8 apples (that is 2 more than before)."),
}
TOO_LARGE = {"#### " + "9" * 100_000, r"\boxed{9^{9^{9}}}"}  # It would take seconds.


def test_math_verify_agrees():
    """An oracle by others. It knows no "####", and pays for one of several answers, so hedges and denials are left out."""
    parse, verify = (getattr(pytest.importorskip("math_verify"), name) for name in ("parse", "verify"))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def paid(completion, answer):
        last = answer.rpartition("####")[2].strip()
        return verify(parse(f"${last}$"), parse(completion.replace("####", "The final answer is ")))

    left_out = {"hedges", "denied or bounded", "no single number"}
    rows = [row for group, rows in TABLE.items() if group not in left_out for row in rows]
    rows = [row for row in rows if row[0] not in OTHERWISE | TOO_LARGE]
    assert len(rows) > 100
    assert [row for row in rows if paid(*row[:2]) != row[2]] == []


# Any number, in any format


WRITTEN = {
    "plain": str,
    "commas": "{:,}".format,
    "spaces": lambda number: f"{number:,}".replace(",", " "),
    "LaTeX": lambda number: f"{number:,}".replace(",", "{,}"),
    "thin spaces": lambda number: f"{number:,}".replace(",", r"\,"),
    "cents": "{:,}.00".format,
    "unicode minus": lambda number: str(number).replace("-", "−"),
    "full width": lambda number: str(number).translate({ord(c): ord(c) + 0xFEE0 for c in "-0123456789"}),
    "dollars": lambda number: f"${number}".replace("$-", "-$"),
    "exponent": "{}e0".format,
    "fraction": lambda number: f"{7 * number}/7",
    "LaTeX fraction": lambda number: rf"\frac{{{7 * number}}}{{7}}",
    "equation": "3 + 4 = {}".format,
}
AROUND = [
    "{}", "#### {}", "####{}.", "#### **{}**", r"\boxed{{{}}}", r"$\boxed{{{}}}$.", r"\boxed{{\text{{{} cups}}}}",
    "The answer is {}.", "The answer is: **{}** cups", "Answer: {}", "So 3 boxes hold {} cups.",
    "3 and then\n#### {}\nThat is all.", "= {} %",
]  # fmt: skip


@given(st.integers(-(10**15), 10**15), st.sampled_from(sorted(WRITTEN)), st.sampled_from(AROUND))
@example(-72, "equation", "Answer: {}")
@example(-1234, "spaces", "So 3 boxes hold {} cups.")
def test_reads_each_whole_number_in_each_format(number, name, around):
    text = around.format(WRITTEN[name](number))
    assert final_answer(text) == number, text
    assert (
        is_right(text, f"{number:,}")
        and not is_right(text, str(number + 1))
        and (number == 0 or not is_right(text, str(-number)))
    )


@given(
    st.decimals(-(10**9), 10**9, places=3),
    st.sampled_from(["{}", "{:,}", "{:e}", "${}", "{}%", r"{}\text{{ km}}"]),
    st.sampled_from(AROUND),
)
def test_reads_each_decimal_exactly(number, written, around):
    assert final_answer(around.format(written.format(number).replace("$-", "-$"))) == Fraction(number)


@given(st.integers(0, 999), st.integers(1, 99), st.integers(1, 99), st.sampled_from(["{} {}/{}", r"{}\frac{{{}}}{{{}}}"]))
def test_reads_each_mixed_number(whole, top, bottom, written):
    assert final_answer("#### " + written.format(whole, top, bottom)) == whole + Fraction(top, bottom)


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from([" or ", ", ", " and ", " - ", "; ", " or maybe ", " cups or "]),
)
def test_never_pays_for_one_of_two(first, second, between):
    if first != second:
        for around in ("#### {}", r"\boxed{{{}}}", "The answer is {}."):
            text = around.format(f"{first}{between}{second}")
            assert not is_right(text, str(first)) and not is_right(text, str(second)), text


# Any text

ANY_CHARACTER = st.characters(exclude_categories=())  # Lone surrogates too.
PIECES = [
    "####",
    r"\boxed{",
    r"\frac{",
    r"\text{",
    "{",
    "}",
    "answer is ",
    "Answer:",
    "72",
    "1,",
    ".",
    "/",
    "-",
    "e9",
    "^",
    "**",
    " ",
    "\n",
    "=",
    "½",
    "$",
    "(",
    "or",
]


@given(st.text(ANY_CHARACTER) | st.lists(st.sampled_from(PIECES)).map("".join))
@example("\x00")
@example("\ud800\udfff")
@example(r"\boxed{" * 1000)
@example("{" * 5000 + "}" * 5000)
@example("#### 1/0 1/0")
@example("#### 2^9999999")
@example("1e" + "9" * 5000)
def test_any_text_gives_a_fraction_or_none(text):
    value = final_answer(text)
    assert value is None or isinstance(value, Fraction)
    assert is_right(text, text) is (value is not None)
    assert is_right("#### 72", text) is (value == 72)


@pytest.mark.parametrize(
    "piece",
    ["9", r"\boxed{", "{", "#", "#### 1\n", "answer is ", "1,", "1 234 ", "1/", " ", "\n", "*", "<<", "<|", "(", "a^", "-"],
)
def test_looks_at_the_end_of_a_huge_text_only(piece):
    """However long the text, what is read has a bounded length: so has the time."""
    seen = []
    with patch.object(answers, "tidy", lambda text, tidy=answers.tidy: seen.append(len(text)) or tidy(text)):
        huge = piece * (10**6 // len(piece))
        assert final_answer(huge) == final_answer(huge[-answers.LONGEST_TEXT :])
        assert final_answer(huge + "\n#### 72") == 72
    assert max(seen) == answers.LONGEST_TEXT


# math-verify: where it serves, and what it must not do here


@pytest.fixture
def math_verify():
    pytest.importorskip("math_verify")


def test_without_math_verify_expressions_are_not_read():
    with patch.dict(sys.modules, {"math_verify": None, "math_verify.errors": None}):
        assert final_answer(r"\boxed{6^2 \cdot 2}") is None
        assert final_answer(r"\boxed{72}") == 72


def test_another_thread_reads_no_expressions_and_does_not_fail(math_verify):
    values = []
    texts = [r"\boxed{6^2 \cdot 2}", r"\boxed{72}"]
    thread = threading.Thread(target=lambda: values.extend(map(final_answer, texts)))
    thread.start()
    thread.join()
    assert values == [None, 72] and final_answer(texts[0]) == 72


def test_an_expression_without_end_is_stopped(math_verify, monkeypatch):
    def forever(latex):
        while True:
            pass

    handler = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(answers, "TIME_LIMIT", 1)
    monkeypatch.setattr(answers, "_evaluate", forever)
    assert final_answer(r"\boxed{6^2 \cdot 2}") is None
    assert signal.getsignal(signal.SIGALRM) == handler and signal.alarm(0) == 0


def test_irrational_and_unwieldy_numbers_are_not_read(math_verify):
    for number in (r"\sqrt{2}", r"\pi", r"1e999", "9" * 50, "2^{60}"):
        assert final_answer(rf"\boxed{{{number}}}") is None, number


def test_nothing_is_printed_or_logged(math_verify, capfd, caplog, monkeypatch):
    monkeypatch.setattr("math_verify.parser.TIMEOUT_WARNING_SHOWN", False)
    for expression in (r"6^2 \cdot 2", r"\frac{1}{0}", "^^^^2", "{{{{2+1", r"\sqrt{5184", "2 + " * 14 + "2"):
        final_answer(rf"\boxed{{{expression}}}")
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_long_expressions_are_not_evaluated(monkeypatch):
    monkeypatch.setattr(answers, "_evaluate", lambda latex: pytest.fail("evaluated"))
    assert final_answer(r"\boxed{" + "1+" * answers.LONGEST_EXPRESSION + "1}") is None
