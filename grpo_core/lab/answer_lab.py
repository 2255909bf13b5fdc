"""AnswerLab: type what a model might write and the true answer, and see which graders pay for it, and which of them are wrong.

A grader can err in two ways: it pays a wrong answer, or it refuses a right one. Left out: whether the completion has ended,
which `TextTask.verify` asks for as well.
"""

import html
import logging
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import ipywidgets as W
import pandas as pd

from grpo_core.bridge.answers import final_answer, is_right
from grpo_core.lab.panel import Panel, table_html


class Example(NamedTuple):
    """A completion, the true answer, and whether a careful reader would call it right."""

    completion: str
    answer: str
    right: bool


EXAMPLES = (
    Example("24 + 48 = 72\n#### 72", "72", True),
    Example("72", "72", True),
    Example("24 + 48 = 72, and twice that is 144.\n#### 144", "72", False),
    Example("#### 172", "72", False),
    Example("#### 1,234", "1234", True),
    Example("The answer is $72.00.", "72", True),
    Example("#### 72 eggs, out of 100", "72", True),
    Example("#### 72 or 73", "72", False),
    Example("#### 70, 71, 72", "72", False),
    Example("#### -5", "5", False),
    Example(r"So \boxed{\frac{3}{4}} of it.", "3/4", True),
    Example("It takes 3 1/2 hours.", "3.5", True),
    Example("It is 24 + 48", "48", False),
    Example("The answer is seventy-two.", "72", True),
)
TRUTHS = ("right", "wrong", "not said")


def same_text(completion: str, answer: str) -> bool:
    return completion == answer


def anywhere(completion: str, answer: str) -> bool:
    return answer in completion


def last_number(completion: str, answer: str) -> bool:
    """Whether the last number of the text is spelled like the answer."""
    return re.findall(r"-?\d[\d.,/]*\d|-?\d", completion)[-1:] == [answer]


def math_verify(completion: str, answer: str) -> bool | None:
    """What the library math-verify says; None if it is not asked.

    Its time limits work in the main thread only, and a widget may answer in another one. So limits are off here, and texts
    that could keep it busy for hours, such as 9^9^9, are held back.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    if busy(completion) or busy(answer):
        return None
    truth, said = (parse(text, parsing_timeout=None) for text in (answer, completion))
    return verify(truth, said, timeout_seconds=None)


def busy(text: str) -> bool:
    """Whether a text is long, or has powers or factorials that could be enormous.

    >>> busy("6^2 = 36"), busy("9^9^9"), busy("2^100000"), busy("It is 72!")
    (False, True, True, False)
    """
    growing = re.findall(r"\^|\*\*|(?<=[\d)}])!", text)
    return len(text) > 2000 or len(growing) > 1 or bool(growing and re.search(r"\d{4}", text))


GRADERS: dict[str, Callable[[str, str], bool | None]] = {
    "same text": same_text,
    "anywhere in the text": anywhere,
    "last number, as text": last_number,
    "is_right (ours)": is_right,
}
if find_spec("math_verify"):
    GRADERS["math-verify"] = math_verify


def verdicts(completion: str, answer: str) -> dict[str, bool | None]:
    """For each grader, whether it pays; None if it was not asked."""
    return {name: grader(completion, answer) for name, grader in GRADERS.items()}


def mistaken(pays: bool | None, right: bool | None) -> bool:
    """Whether a verdict is known to be wrong."""
    return pays is not None and right is not None and pays != right


def grader_table(examples: Sequence[Example] = EXAMPLES) -> pd.DataFrame:
    """All examples by all graders, in words; a mistake has a cross. The last row counts them.

    >>> table = grader_table([Example("#### 172", "72", False)])
    >>> table["anywhere in the text"].tolist(), table["is_right (ours)"].tolist()
    (['✗ pays', '1'], ['refuses', '0'])
    """
    rows, count = [], dict.fromkeys(GRADERS, 0)
    for completion, answer, right in examples:
        said = verdicts(completion, answer)
        count = {name: count[name] + mistaken(pays, right) for name, pays in said.items()}
        words = {name: in_words(pays, right) for name, pays in said.items()}
        rows.append([completion.replace("\n", " ⏎ "), answer, "right" if right else "wrong", *words.values()])
    rows.append(["mistakes", "", "", *map(str, count.values())])
    return pd.DataFrame(rows, columns=["completion", "true answer", "it is", *GRADERS])


def in_words(pays: bool | None, right: bool | None) -> str:
    verdict = "not asked" if pays is None else "pays" if pays else "refuses"
    return f"✗ {verdict}" if mistaken(pays, right) else verdict


class AnswerLab(Panel):
    """Choose an example, or type; below, what each grader says. Of a new text, it is you who says whether it is right.

    Args:
        examples: completions with true answers, and whether they are right.

    Raises:
        ValueError: there are no examples.
    """

    def __init__(self, examples: Sequence[Example] = EXAMPLES):
        if not examples:
            raise ValueError("give at least one Example(completion, answer, right)")
        self.examples = [Example(*example) for example in examples]
        names = [f"{i + 1}. {(e.completion.splitlines() or ['(empty)'])[-1]}" for i, e in enumerate(self.examples)]
        self.example = W.Dropdown(options=[(name, i) for i, name in enumerate(names)], description="example")
        self.completion = W.Textarea(description="completion", layout=W.Layout(width="420px", height="70px"))
        self.answer = W.Text(description="true answer")
        self.truth = W.ToggleButtons(options=TRUTHS, description="it is", style={"button_width": "90px"})
        self._fill()
        self._filling = False
        self.example.observe(self._chosen, "value")
        for control in (self.completion, self.answer, self.truth):
            control.observe(self._changed, "value")
        super().__init__([[self.example], [self.completion], [self.answer, self.truth]], height=240)

    @property
    def right(self) -> bool | None:
        """Whether the completion is right; None if nobody has said so."""
        return {"right": True, "wrong": False}.get(self.truth.value)

    def _fill(self) -> None:
        example = self.examples[self.example.value]
        self.completion.value, self.answer.value = example.completion, example.answer
        self.truth.value = "right" if example.right else "wrong"

    def _chosen(self, _) -> None:
        self._filling = True  # An example sets three controls; it is shown once.
        self._fill()
        self._filling = False
        self.refresh()

    def _changed(self, change) -> None:
        if self._filling:
            return
        if change["owner"] is not self.truth:
            self.truth.value = "not said"
        self.refresh()

    def view(self) -> str:
        said = verdicts(self.completion.value, self.answer.value)
        read = final_answer(self.completion.value)
        number = "no number for certain" if read is None else str(read).replace("-", "−")
        rows = [[name, in_words(pays, None), self._judged(pays)] for name, pays in said.items()]
        story = f"<p>is_right reads <b>{number}</b>. {html.escape(self.sentence(said), quote=False)}</p>"
        return story + table_html(["grader", "it", "which is"], rows)

    def _judged(self, pays: bool | None) -> str:
        if pays is None or self.right is None:
            return "–"
        if not mistaken(pays, self.right):
            return "✓ as it should be"
        return "✗ a mistake: the answer is wrong" if pays else "✗ a mistake: the answer is right"

    def sentence(self, said: dict[str, bool | None]) -> str:
        """Who is wrong; or, as long as nobody says what is true, who would pay."""
        pay = [name for name, pays in said.items() if pays]
        wrong = [name for name, pays in said.items() if mistaken(pays, self.right)]
        if self.right is None:
            return f"It is paid by {listed(pay)}. Read the completion: is it right?"
        if not wrong:
            return "Nobody is wrong."
        verb = "refuses a right" if self.right else "pays a wrong"
        return f"Wrong is who {verb} answer: {listed(wrong)}."

    def static(self) -> str:
        table = grader_table(self.examples)
        note = "<p>Each grader pays or refuses; ✗ marks a mistake, and the last row counts them.</p>"
        return note + table_html(list(table), table.to_numpy().tolist(), marked=len(table) - 1)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed([]), listed(["a"]), listed(["a", "b", "c"])
    ('nobody', '“a”', '“a”, “b” and “c”')
    """
    *most, last = [f"“{name}”" for name in names] or ["nobody"]
    return f"{', '.join(most)} and {last}" if most else last
