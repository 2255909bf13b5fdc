"""Word problems in GSM8K's format, from the Hugging Face hub or from local JSON Lines files, split into three disjoint parts.

One record is {"question": …, "answer": …}: the answer is a worked solution that ends in "#### 72". Reading is strict, so that
a broken file is found before a model is loaded: an error names the file, the line and what to do. Left out: other formats.
"""

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from grpo_core.bridge.answers import final_answer
from grpo_core.checkpoint import write_atomically
from grpo_core.config import is_whole
from grpo_core.task import Problem

HUB = "openai/gsm8k"
SOURCES = "data must be gsm8k, a folder with train.jsonl and test.jsonl, or a .jsonl file"
UNREACHABLE = f"""{HUB} cannot be loaded: the Hugging Face hub cannot be reached, and there is no copy in the cache.
On a machine with network run

    pip install datasets
    python -c "from datasets import load_dataset as load; [x.to_json(f'{{p}}.jsonl') for p, x in load('{HUB}', 'main').items()]"

then copy train.jsonl and test.jsonl into a folder here, and give that folder as data."""


class Splits(NamedTuple):
    """Three lists of problems without a common question: to train on, to choose settings by, to report only."""

    train: list[Problem]
    validation: list[Problem]
    held_out: list[Problem]


def load_problems(data: str | Path, validation: int = 400) -> Splits:
    """The problems of a data set, each with its final answer as written behind "####".

    Args:
        data: "gsm8k" (openai/gsm8k on the hub, or its copy in the cache); a folder with train.jsonl and test.jsonl; or one
            .jsonl file. Test problems are held out; of a single file a tenth, but no more than `validation`, always the same.
        validation: how many of the other problems to validate on, but at most a tenth: the last ones, of a single file any.

    Raises:
        ValueError: the data cannot be found, reached or read, or there are too few problems to split.
    """
    if not is_whole(validation) or validation < 1:
        raise ValueError(f"validation must be a whole number above 0, got {validation!r}")
    if data == "gsm8k":
        return _split(_from_hub("train"), _from_hub("test"), validation)
    path = Path(data)
    if path.is_dir():
        missing = [name for name in ("train.jsonl", "test.jsonl") if not (path / name).is_file()]
        if missing:
            raise ValueError(f"the folder {path} has no {' and no '.join(missing)}: {SOURCES}")
        return _split(read_json_lines(path / "train.jsonl"), read_json_lines(path / "test.jsonl"), validation)
    problems = sorted({problem.prompt: problem for problem in read_json_lines(path)}.values())
    random.Random(0).shuffle(problems)
    size = min(validation, len(problems) // 10)
    return _split(problems[size:], problems[:size], validation)


def _split(train: list[Problem], held_out: list[Problem], validation: int) -> Splits:
    """Take held-out questions out of `train`, then its last problems for validation."""
    reported = {problem.prompt for problem in held_out}
    rest = list({problem.prompt: problem for problem in train if problem.prompt not in reported}.values())
    size = min(validation, len(rest) // 10)
    if size == 0:
        raise ValueError(f"{len(rest)} problems to train on, {len(held_out)} held out: too few to split, give at least 20")
    return Splits(rest[:-size], rest[-size:], held_out)


def _from_hub(part: str) -> list[Problem]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError('data "gsm8k" needs the package datasets: pip install -e ".[real]". ' + SOURCES) from None
    try:
        records = load_dataset(HUB, "main", split=part)
    except Exception as error:  # Whatever goes wrong on the way to the hub has a type of its own.
        raise ValueError(f"{UNREACHABLE}\n({type(error).__name__}: {error})") from error
    return [to_problem(record, f"record {number} of {HUB}, {part}") for number, record in enumerate(records, 1)]


def read_json_lines(path: str | Path) -> list[Problem]:
    """The problems of a JSON Lines file in GSM8K's format, in their order.

    Raises:
        ValueError: as `read_records`.
    """
    return [to_problem(record, f"a record of {path}") for record in read_records(path)]


def read_records(path: str | Path) -> list[dict]:
    """The records of a JSON Lines file, worked solutions included: what supervised fine-tuning needs. Empty lines are skipped.

    Raises:
        ValueError: there is no such file, it is empty or not UTF-8, or a line is no record in GSM8K's format. Says which line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ValueError(f"there is no file or folder {path}: {SOURCES}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse(line, f"line {number} of {path}")
        if record is not None:
            records.append(record)
    if not records:
        raise ValueError(f"{path} is empty: give a file with one record on each line")
    return records


def _parse(line: bytes, where: str) -> dict | None:
    """A line's record, checked; None for an empty line."""
    try:
        text = line.decode("utf-8-sig").strip()  # Some editors put a byte order mark first.
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: save the file as plain UTF-8 text, uncompressed") from error
    if not text:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "too deeply nested")
        raise ValueError(f"{where} is not valid JSON ({reason}): write one whole record on each line, or delete it") from error
    to_problem(record, where)
    return record


def to_problem(record: dict, where: str = "the record") -> Problem:
    """The problem in a record of GSM8K's format.

    Args:
        record: with the texts "question" and "answer"; other keys are ignored.
        where: names the record in errors.

    Raises:
        ValueError: a key is missing, the question is empty, or the answer does not end in "####" and a number.

    >>> to_problem({"question": "24 red and 48 blue cups, how many?", "answer": "24 + 48 = 72\\n#### 72"}).answer
    '72'
    """
    if not isinstance(record, dict):
        raise ValueError(f'{where} is a {type(record).__name__}, not an object: write {{"question": …, "answer": "… #### 72"}}')
    missing = [key for key in ("question", "answer") if key not in record]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}: its keys are {', '.join(record) or 'none'}. Rename them")
    question, answer = record["question"], record["answer"]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where} has no text as its question, but {question!r}: fill it in, or delete the record")
    _, mark, number = answer.rpartition("####") if isinstance(answer, str) else ("", "", "")
    number = number.strip()
    if not mark or "\n" in number or final_answer(f"#### {number}") is None:
        raise ValueError(f'{where} has an answer that does not end in "####" and a number, but {str(answer)[-60:]!r}: add them')
    return Problem(question.strip(), number)


def solution(record: dict) -> str:
    """The worked solution of a record, "#### 72" included, without GSM8K's marks for a calculator.

    >>> solution({"answer": "24 + 48 = <<24+48=72>>72\\n#### 72"})
    '24 + 48 = 72\\n#### 72'
    """
    return re.sub(r"<<[^<>\n]*>>", "", record["answer"])


def write_json_lines(path: str | Path, records: Iterable[dict]) -> None:
    """Write records as a JSON Lines file, in one step: what is on disk is the old file or the new one."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_atomically(path, lambda file: file.write(text.encode()))
