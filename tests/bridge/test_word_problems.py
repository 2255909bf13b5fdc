"""Generated word problems: each is solved again by hand-written rules, and no part of the split gives another one away."""

import ast
import importlib.util
import re
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from zlib import crc32

import pytest

from grpo_core.bridge.answers import is_right
from grpo_core.bridge.gsm8k import load_problems, write_json_lines
from grpo_core.bridge.word_problems import MOST, TEMPLATES, THINGS, word_problem_records, word_problem_splits, word_problems

# The oracle: how a reader solves a question that begins like this, given its numbers in the order in which they are read.
BY_HAND = {
    "A shelf": lambda a, b: a + b,
    "There are N red": lambda a, b: a + b,
    "A lamp": lambda a, b: a + b,
    "A pump": lambda a, b: a + b,
    "A museum": lambda rooms, a, b: a + b,
    "A depot": lambda a, b: a + b,
    "A jar": lambda a, b: a - b,
    "A rope": lambda a, b: a - b,
    "A clock": lambda a, b: a - b,
    "A box": lambda a, b: a - b,
    "There are N boxes": lambda a, b: a * b,
    "A machine": lambda a, hours: a * hours,
    "A ticket": lambda price, b: price * b,
    "A crate": lambda a, b, c: a + b - c,
    "A bag": lambda packs, each, loose: packs * each + loose,
    "A tank": lambda a, b, c: a - b - c,
}
NUMBER = r"\d{1,3}(?:,\d{3})+|\d+"


def numbers(text):
    return [int(number.replace(",", "")) for number in re.findall(NUMBER, text)]


def kind(question):
    shape = re.sub(NUMBER, "N", question)
    return next(beginning for beginning in BY_HAND if shape.startswith(beginning + " "))


@pytest.fixture(scope="module")
def parts():
    return word_problem_records()


@pytest.fixture(scope="module")
def records(parts):
    return [record for part in parts for record in part]


def test_each_answer_is_what_a_reader_finds(records):
    for record in records:
        found = BY_HAND[kind(record["question"])](*numbers(record["question"]))
        assert record["answer"].endswith(f"\n#### {found:,}") and found >= 0, record


def test_each_line_of_a_solution_is_true_and_the_last_one_is_the_answer(records):
    for record in records:
        *lines, last = record["answer"].split("\n")
        for line in lines:
            left, right = line.replace(",", "").split(" = ")
            assert re.fullmatch(r"\d+ [-+*] \d+", left) and eval(left) == int(right), line
        assert last == "#### " + lines[-1].split(" = ")[1]


def test_a_solution_uses_each_number_of_the_question_once_but_for_the_one_that_distracts(records):
    for record in records:
        given = Counter(numbers(record["question"]))
        *lines, _ = record["answer"].split("\n")
        results = Counter(int(line.split(" = ")[1].replace(",", "")) for line in lines[:-1])
        used = Counter(number for line in lines for number in numbers(line.split(" = ")[0]))
        unused = given - (used - results)
        assert not (used - results) - given and not results - used
        assert unused.total() == (kind(record["question"]) == "A museum"), record


def test_answers_are_written_as_the_verifier_reads_them(parts):
    records, problems = parts[0], word_problem_splits().train
    assert [problem.prompt for problem in problems] == [record["question"] for record in records]
    for record, problem in zip(records[::4], problems[::4]):
        assert is_right(record["answer"], problem.answer)
        assert not is_right(f"#### {numbers(problem.answer)[0] + 10}", problem.answer)


def test_all_templates_come_equally_often_and_have_both_distractors_thousands_and_dollars():
    problems = word_problems(12 * len(TEMPLATES), seed=1)
    counts = Counter(kind(problem["question"]) for problem in problems)
    assert len(TEMPLATES) >= 12 and set(counts) == set(BY_HAND) and set(counts.values()) == {12}
    text = "\n".join(problem["question"] for problem in problems)
    assert "$" in text and re.search(r"\d,\d00 ", text) and all(f" {thing}" in text for thing in THINGS)
    assert max(problem["answer"].count(" = ") for problem in problems) == 2


def test_problems_are_different_and_depend_on_the_seed_alone():
    many = word_problems(3000, seed=2)
    assert len({problem["question"] for problem in many}) == 3000
    assert word_problems(3000, seed=2) == many and word_problems(30, seed=2) == many[:30]
    assert word_problems(30, seed=3) != many[:30]
    assert word_problems(0, seed=2) == []


@pytest.mark.parametrize("count", [-1, MOST + 1])
def test_more_problems_than_there_are_would_be_searched_for_forever(count):
    with pytest.raises(ValueError, match="count must lie between 0 and 50,000"):
        word_problems(count, seed=0)


# The split


def test_split_is_fixed(records):
    """The shipped model was taught the training problems of this split: with another one its accuracy would mean nothing."""
    assert crc32(repr(records).encode()) == 922062334


def test_parts_have_their_sizes_and_all_templates(parts):
    train, validation, held_out = parts
    assert len(train) >= 3000 and len(validation) == len(held_out) == 400
    assert word_problem_splits()._fields == ("train", "validation", "held_out")
    for part in parts:
        assert {kind(record["question"]) for record in part} == set(BY_HAND)


def test_no_two_parts_share_a_question_or_the_numbers_of_one(parts):
    for these, others in combinations(parts, 2):
        assert {r["question"] for r in these}.isdisjoint(r["question"] for r in others)
        assert {tuple(sorted(numbers(r["question"]))) for r in these}.isdisjoint(
            tuple(sorted(numbers(r["question"]))) for r in others
        )


def test_problems_are_a_data_set_that_the_reader_takes(tmp_path):
    write_json_lines(tmp_path / "problems.jsonl", word_problems(100, seed=4))
    splits = load_problems(tmp_path / "problems.jsonl")
    assert [len(part) for part in splits] == [81, 9, 10]


def test_nothing_of_the_extra_is_imported():
    """Nor by what it imports: whoever has only the core can make word problems and check answers."""
    light = {f"grpo_core.bridge.{name}" for name in ("answers", "gsm8k", "word_problems")}
    for name in light:
        source = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
        imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {getattr(node, "module", node.names[0].name) for node in imports}
        assert {module.split(".")[0] for module in modules} <= {*sys.stdlib_module_names, "torch", "grpo_core"}
        assert {module for module in modules if module.startswith("grpo_core.bridge")} <= light
