"""The reader of GSM8K's format: a good file gives its problems, a bad one an error that says where and what to do."""

import gzip
import json
import re
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from grpo_core import Problem
from grpo_core.bridge import gsm8k
from grpo_core.bridge.gsm8k import Splits, load_problems, read_json_lines, read_records, solution, to_problem, write_json_lines

GOOD = '{"question": "How many?", "answer": "24 + 48 = <<24+48=72>>72\\n#### 72"}'


def records(count, start=0):
    return [{"question": f"{i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1:,}"} for i in range(start, start + count)]


def file(folder, content):
    path = folder / "some.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def folder_of(path, train, test):
    write_json_lines(path / "train.jsonl", train)
    write_json_lines(path / "test.jsonl", test)
    return path


# Good files


def test_what_is_written_is_read(tmp_path):
    written = [*records(3), {"question": 'größer, 大きい\u2028\x85, \\ and "?', "answer": "#### -1,234.5", "level": 3}]
    write_json_lines(tmp_path / "new" / "x.jsonl", written)
    assert read_records(tmp_path / "new" / "x.jsonl") == written
    assert read_json_lines(tmp_path / "new" / "x.jsonl")[-1] == Problem(written[-1]["question"], "-1,234.5")


@pytest.mark.parametrize("content", [
    GOOD, GOOD + "\n", f"\n\n{GOOD}\n \n", f"\ufeff{GOOD}\n", f"{GOOD}\r\n\r\n", b"\xef\xbb\xbf\n" + GOOD.encode(),
])  # fmt: skip
def test_byte_order_mark_and_empty_lines_do_not_matter(tmp_path, content):
    assert read_json_lines(str(file(tmp_path, content))) == [Problem("How many?", "72")]


def test_solution_has_no_calculator_marks_and_the_record_keeps_them(tmp_path):
    (record,) = read_records(file(tmp_path, GOOD))
    assert solution(record) == "24 + 48 = 72\n#### 72" and "<<24+48=72>>" in record["answer"]
    assert solution({"answer": "1 + 1 = <<1+1=2>>2 and 2 + 2 = <<2+2=4>>4\n#### 4"}) == "1 + 1 = 2 and 2 + 2 = 4\n#### 4"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.jsonl"
    write_json_lines(path, records(1))
    with pytest.raises(TypeError):
        write_json_lines(path, [{"question": object()}])
    assert read_records(path) == records(1) and list(tmp_path.iterdir()) == [path]


# Bad files


@pytest.mark.parametrize("content, message", [
    ("", "is empty: give a file"),
    (" \n\n", "is empty: give a file"),
    ("\ufeff", "is empty: give a file"),
    (f'{GOOD}\n\n{{"question": "a?"', r"line 3 of .*some\.jsonl is not valid JSON \(.*\): write one whole record on each line"),
    (f"{GOOD}{GOOD}", r"line 1 of .* is not valid JSON \(Extra data\)"),
    ("[" * 100_000, "line 1 of .* is not valid JSON"),
    ('{"question": "a?", "answer": ' + "9" * 5000 + "}", "line 1 of .* is not valid JSON"),
    (f"{GOOD}\n[1, 2]", r"line 2 of .* is a list, not an object: write \{"),
    ("null", "line 1 of .* is a NoneType, not an object"),
    ('"text"', "line 1 of .* is a str, not an object"),
    (f'{GOOD}\n{{"question": "a?", "gold": "7"}}', "line 2 of .* has no answer: its keys are question, gold. Rename them"),
    ('{"answer": "#### 72"}', "line 1 of .* has no question: its keys are answer"),
    ("{}", "line 1 of .* has no question and no answer: its keys are none"),
    ('{"question": " ", "answer": "#### 72"}', "line 1 of .* has no text as its question, but ' '"),
    ('{"question": 7, "answer": "#### 72"}', "line 1 of .* has no text as its question, but 7"),
    ('{"question": "a?", "answer": "72"}', r"""line 1 of .* does not end in "####" and a number, but '72': add them"""),
    ('{"question": "a?", "answer": 72}', 'line 1 of .* does not end in "####" and a number'),
    ('{"question": "a?", "answer": null}', 'line 1 of .* does not end in "####" and a number'),
    ('{"question": "a?", "answer": "#### many"}', 'line 1 of .* does not end in "####" and a number'),
    ('{"question": "a?", "answer": "#### 72 or 73"}', 'line 1 of .* does not end in "####" and a number'),
    ('{"question": "a?", "answer": "24 + 48 = 72\\n####"}', 'line 1 of .* does not end in "####" and a number'),
    ('{"question": "a?", "answer": "#### 72\\nThat is all."}', 'line 1 of .* does not end in "####" and a number'),
    (GOOD.encode() + b"\n\xff\xfe", "line 2 of .* is not UTF-8: save the file as plain UTF-8 text"),
    (GOOD.encode("utf-16"), "line 1 of .* is not UTF-8"),
    (gzip.compress(GOOD.encode(), mtime=0), "line 1 of .* is not UTF-8: .*uncompressed"),
])  # fmt: skip
def test_says_what_is_wrong_in_which_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_records(file(tmp_path, content))
    with pytest.raises(ValueError, match=message):
        load_problems(file(tmp_path, content))


def test_says_that_there_is_no_file_or_folder(tmp_path):
    for read in (read_records, read_json_lines, load_problems):
        with pytest.raises(ValueError, match=r"no file or folder .*nothing: data must be gsm8k, a folder"):
            read(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        read_records(tmp_path)


def test_says_which_file_a_folder_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"has no train.jsonl and no test.jsonl: data must be"):
        load_problems(tmp_path)
    write_json_lines(tmp_path / "train.jsonl", records(40))
    with pytest.raises(ValueError, match=r"the folder .* has no test.jsonl: data must be"):
        load_problems(tmp_path)


# Splits


def questions(part):
    return {problem.prompt for problem in part}


def are_disjoint(splits):
    return sum(map(len, splits)) == len(set().union(*map(questions, splits)))


def test_folder_holds_its_test_problems_out_and_validates_on_the_last_train_problems(tmp_path):
    splits = load_problems(str(folder_of(tmp_path, records(100), records(30, start=500))), validation=7)
    assert isinstance(splits, Splits)
    assert splits.held_out == [to_problem(record) for record in records(30, start=500)]
    assert splits.train + splits.validation == [to_problem(record) for record in records(100)]
    assert len(splits.validation) == 7 and splits.validation[-1].prompt == "99 + 1?"
    assert len(load_problems(tmp_path).validation) == 10  # 400, but at most a tenth.


def test_a_question_is_in_one_part_only(tmp_path):
    splits = load_problems(folder_of(tmp_path, records(100) + records(50), records(30, start=90)), validation=7)
    assert are_disjoint(splits) and len(splits.held_out) == 30 and len(splits.train) == 90 - 7
    write_json_lines(tmp_path / "one.jsonl", records(100) + records(50))
    splits = load_problems(tmp_path / "one.jsonl")
    assert are_disjoint(splits) and sum(map(len, splits)) == 100


def test_one_file_is_split_always_in_the_same_way_whatever_its_order(tmp_path):
    write_json_lines(tmp_path / "a.jsonl", records(200))
    write_json_lines(tmp_path / "b.jsonl", records(200)[::-1])
    splits = load_problems(tmp_path / "a.jsonl")
    assert splits == load_problems(tmp_path / "a.jsonl") == load_problems(tmp_path / "b.jsonl")
    assert list(map(len, splits)) == [162, 18, 20] and are_disjoint(splits)
    assert splits.held_out != sorted(splits.held_out)  # Drawn, and not cut off one end.
    assert list(map(len, load_problems(tmp_path / "a.jsonl", validation=5))) == [190, 5, 5]


@pytest.mark.parametrize("count", [1, 9, 10])
def test_too_few_problems_to_split(tmp_path, count):
    write_json_lines(tmp_path / "few.jsonl", records(count))
    with pytest.raises(ValueError, match="too few to split, give at least 20"):
        load_problems(tmp_path / "few.jsonl")
    with pytest.raises(ValueError, match="too few to split"):
        load_problems(folder_of(tmp_path, records(count - 1) or records(1), records(5, start=50)))


def test_twenty_problems_are_enough(tmp_path):
    write_json_lines(tmp_path / "few.jsonl", records(20))
    assert list(map(len, load_problems(tmp_path / "few.jsonl"))) == [17, 1, 2]


@pytest.mark.parametrize("validation", [0, -1, 2.5, True, "7", None])
def test_number_of_validation_problems_is_checked_first(validation):
    with pytest.raises(ValueError, match="validation must be a whole number above 0"):
        load_problems("gsm8k", validation)


# The hub


def hub(train, test, broken=None):
    """A stand-in for the package datasets."""

    def load_dataset(name, configuration, split):
        assert (name, configuration) == ("openai/gsm8k", "main")
        if broken:
            raise broken
        return {"train": train, "test": test}[split]

    return patch.dict(sys.modules, {"datasets": SimpleNamespace(load_dataset=load_dataset)})


def test_gsm8k_from_the_hub_has_400_validation_problems():
    with hub(records(7473), records(1319, start=8000)):
        splits = load_problems("gsm8k")
    assert list(map(len, splits)) == [7073, 400, 1319]
    assert splits.train[1] == Problem("1 + 1?", "2") and splits.held_out[0] == Problem("8000 + 1?", "8,001")


def test_a_bad_record_of_the_hub_is_named():
    with hub([*records(3), {"question": "a?"}], records(1)), pytest.raises(ValueError, match="record 4 of openai/gsm8k, train"):
        load_problems("gsm8k")


@pytest.mark.parametrize("error", [ConnectionError("no network"), FileNotFoundError("no cache"), RuntimeError("proxy")])
def test_says_what_to_do_where_the_hub_cannot_be_reached(error):
    message = f"cannot be reached, and there is no copy in the cache.*give that folder as data.*{type(error).__name__}: {error}"
    with hub([], [], error), pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        load_problems("gsm8k")


def test_advice_gives_a_folder_that_can_be_read(tmp_path, monkeypatch):
    """The program in the advice is run, with a stand-in for the hub, and what it leaves is loaded."""
    datasets = pytest.importorskip("datasets")
    parts = {"train": datasets.Dataset.from_list(records(40)), "test": datasets.Dataset.from_list(records(5, start=50))}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration: parts)
    monkeypatch.chdir(tmp_path)
    exec(re.search(r'python -c "(.*)"', gsm8k.UNREACHABLE)[1], {})
    assert list(map(len, load_problems(tmp_path))) == [36, 4, 5]


def test_hub_that_is_offline_and_has_no_copy(tmp_path):
    """With the package itself, told that there is no network, and with an empty cache."""
    datasets = pytest.importorskip("datasets")
    offline = patch.object(datasets.config, "HF_HUB_OFFLINE", True)
    cache = patch.object(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with (
        offline,
        cache,
        patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        pytest.raises(ValueError, match="hub cannot be"),
    ):
        load_problems("gsm8k")


def test_without_the_package_datasets():
    with patch.dict(sys.modules, {"datasets": None}), pytest.raises(ValueError, match=r"pip install -e \"\.\[real\]\""):
        load_problems("gsm8k")


def test_files_need_no_package(tmp_path):
    write_json_lines(tmp_path / "x.jsonl", records(30))
    with patch.dict(sys.modules, {"datasets": None, "math_verify": None, "transformers": None}):
        assert load_problems(tmp_path / "x.jsonl").train
    assert json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0]) == records(1)[0]
