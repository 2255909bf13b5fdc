"""Word problems like those of GSM8K, made by templates: questions about things, worked solutions of one or two steps.

They are to GSM8K what two-digit sums are to arithmetic: in the format of the real data, and small enough that a tiny model
learns them in seconds. Left out: language. Only the numbers and the things of a sentence ever change.
"""

import random
from itertools import cycle
from typing import NamedTuple
from zlib import crc32

from grpo_core.bridge.gsm8k import Splits, to_problem

THINGS = ("apples", "books", "bricks", "cards", "coins", "cups", "eggs", "keys", "lamps", "maps", "pens", "stones")


class Template(NamedTuple):
    """A question with gaps, the steps that solve it, and the numbers that may stand in its gaps.

    Attributes:
        question: {a}, {b} and {c} are its numbers, {things} is one of THINGS. A number that is in no step only distracts.
        steps: operations on two numbers; {x} is the result of the step before.
        numbers: the values of each gap.
    """

    question: str
    steps: tuple[str, ...]
    numbers: dict[str, range]


SUM = {"a": range(10, 60), "b": range(10, 60)}
DIFFERENCE = {"a": range(30, 100), "b": range(10, 30)}
PRODUCT = {"a": range(2, 4), "b": range(10, 50)}
TEMPLATES = (
    Template("A shelf holds {a} {things} and a box holds {b}. How many {things} are there?", ("{a} + {b}",), SUM),
    Template("There are {a} red {things} and {b} blue {things}. How many {things} are there?", ("{a} + {b}",), SUM),
    Template("A lamp costs ${a} and a desk costs ${b}. How many dollars do they cost together?", ("{a} + {b}",), SUM),
    Template("A pump moves {a} liters, then {b} liters more. How many liters does it move?", ("{a} + {b}",), SUM),
    Template(
        "A museum with {c} rooms has {a} {things} and buys {b} more. How many {things} does it have now?",
        ("{a} + {b}",),
        SUM | {"c": range(2, 10)},
    ),
    Template(
        "A depot has {a:,} {things}. A truck brings {b:,} more. How many {things} are there now?",
        ("{a:,} + {b:,}",),
        {"a": range(1100, 9000, 100), "b": range(100, 1000, 100)},
    ),
    Template("A jar held {a} {things}. {b} were taken out. How many {things} are left?", ("{a} - {b}",), DIFFERENCE),
    Template("A rope of {a} meters is cut. One piece has {b} meters. How long is the other?", ("{a} - {b}",), DIFFERENCE),
    Template("A clock costs ${a}. A coupon takes ${b} off. How many dollars is it now?", ("{a} - {b}",), DIFFERENCE),
    Template("A box of {a} {things} has {b} broken ones. How many {things} are whole?", ("{a} - {b}",), DIFFERENCE),
    Template("There are {a} boxes with {b} {things} each. How many {things} are there?", ("{a} * {b}",), PRODUCT),
    Template("A machine makes {b} {things} an hour. How many does it make in {a} hours?", ("{a} * {b}",), PRODUCT),
    Template("A ticket costs ${b}. How many dollars do {a} tickets cost?", ("{a} * {b}",), PRODUCT),
    Template(
        "A crate had {a} {things}. {b} were added and {c} taken out. How many {things} are in it now?",
        ("{a} + {b}", "{x} - {c}"),
        {"a": range(20, 60), "b": range(10, 40), "c": range(2, 10)},
    ),
    Template(
        "A bag holds {a} packs of {b} {things} and {c} loose ones. How many {things} does it hold?",
        ("{a} * {b}", "{x} + {c}"),
        PRODUCT | {"b": range(10, 30), "c": range(2, 10)},
    ),
    Template(
        "A tank had {a} liters. {b} liters leaked out, then {c} more. How many liters are left?",
        ("{a} - {b}", "{x} - {c}"),
        {"a": range(50, 100), "b": range(10, 30), "c": range(2, 10)},
    ),
)
MOST = 50_000  # Of about 500,000 different questions: so many are found in a moment.


def word_problems(count: int, seed: int) -> list[dict[str, str]]:
    """Different problems as records in GSM8K's format, from all templates in turn.

    Args:
        count: how many.
        seed: of the numbers and the things.

    Raises:
        ValueError: `count` is negative or above 50,000.

    >>> word_problems(1, seed=0)
    [{'question': 'A shelf holds 34 eggs and a box holds 58. How many eggs are there?', 'answer': '34 + 58 = 92\\n#### 92'}]
    """
    return [record for record, _ in draw(count, seed)]


def word_problem_splits() -> Splits:
    """The problems of `word_problem_records` with their final answers: a task's three parts."""
    return Splits(*([to_problem(record) for record in part] for part in word_problem_records()))


def word_problem_records() -> tuple[list[dict], list[dict], list[dict]]:
    """About 5,000 records to train on, 400 to choose settings by, 400 to report only. The split is fixed.

    The parts are split by the numbers of a problem, whatever its template: where "24 + 48" is held out, neither "48 + 24" nor
    "48 - 24" is trained on.
    """
    parts = {"train": [], "validation": [], "held_out": []}
    for record, numbers in draw(6000, seed=0):
        digest = crc32(repr(numbers).encode()) % 12  # A hash that is the same in every process.
        parts[{0: "held_out", 1: "validation"}.get(digest, "train")].append(record)
    return parts["train"], parts["validation"][:400], parts["held_out"][:400]


def draw(count: int, seed: int) -> list[tuple[dict[str, str], list[int]]]:
    """Records, each with its numbers in ascending order."""
    if not 0 <= count <= MOST:
        raise ValueError(f"count must lie between 0 and {MOST:,}, got {count}")
    rng = random.Random(seed)
    drawn = {}
    for template in cycle(TEMPLATES):
        if len(drawn) == count:
            return list(drawn.values())
        numbers = {gap: rng.choice(values) for gap, values in template.numbers.items()}
        question = template.question.format(things=rng.choice(THINGS), **numbers)
        drawn[question] = {"question": question, "answer": solve(template, numbers)}, sorted(numbers.values())


def solve(template: Template, numbers: dict[str, int]) -> str:
    """The worked solution: a line for each step, then "####" and the result of the last one.

    >>> solve(TEMPLATES[-1], {"a": 50, "b": 10, "c": 2})
    '50 - 10 = 40\\n40 - 2 = 38\\n#### 38'
    """
    lines, x = [], None
    for step in template.steps:
        left, sign, right = step.format(x=x, **numbers).split()
        a, b = int(left.replace(",", "")), int(right.replace(",", ""))
        x = {"+": a + b, "-": a - b, "*": a * b}[sign]
        lines.append(f"{left} {sign} {right} = {x:,}")
    return "\n".join([*lines, f"#### {x:,}"])
