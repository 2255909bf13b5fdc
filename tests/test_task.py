"""The task: a fixed split without leaks, exact text, and a verifier that cannot be talked round."""

import random

import pytest
import torch

from grpo_core import Addition


@pytest.fixture(scope="module", params=[1, 2, 3])
def sums(request):
    return Addition(request.param)


def pair(problem):
    return tuple(sorted(problem.prompt.rstrip("=").split("+")))


def test_no_pair_of_numbers_is_in_two_parts_of_the_split(sums):
    parts = [{pair(problem) for problem in part} for part in (sums.train, sums.validation, sums.held_out)]
    assert all(parts)
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])


def test_every_answer_is_the_sum_and_fits_with_its_eos(sums):
    problems = sums.train + sums.validation + sums.held_out
    for prompt, answer in problems[:: 1 + len(problems) // 20_000]:
        assert sum(map(int, prompt.rstrip("=").split("+"))) == int(answer)
        assert len(sums.encode(answer + ";")) <= sums.max_new_tokens


def test_split_covers_all_sums_and_keeps_400_each_for_choosing_and_reporting(task):
    assert len(task.validation) == len(task.held_out) == 400
    assert len({pair(p) for p in task.train + task.validation + task.held_out}) == 90 * 91 // 2
    assert len(set(task.train)) == len(task.train)


def test_split_is_the_same_whatever_ran_before(task):
    random.seed(1)
    before = random.getstate()
    assert (Addition().train, Addition().held_out) == (task.train, task.held_out)
    assert random.getstate() == before


def test_example_may_be_trained_on(sums):
    assert sums.example in sums.train


@pytest.mark.parametrize("digits", [0, 4, -1, None, "2"])
def test_digits_outside_one_to_three_are_refused(digits):
    with pytest.raises(ValueError, match="digits"):
        Addition(digits)


def test_encode_and_decode_are_inverse(task):
    assert task.decode(task.encode("0123456789+=;")) == "0123456789+=;"
    assert task.decode(torch.tensor(task.encode("72"))) == "72"


def test_decode_ends_with_the_first_eos(task):
    assert task.decode(task.encode("72;;;9;")) == "72;"


@pytest.mark.parametrize("text, named", [("1 + 2=", "' '"), ("a", "'a'"), ("１=", "'１'"), ("1-2×3", "'-', '×'")])
def test_encode_names_the_unknown_characters(task, text, named):
    with pytest.raises(ValueError, match="vocabulary") as error:
        task.encode(text)
    assert named in str(error.value)


@pytest.mark.parametrize("completion", ["72", "73;", "072;", " 72;", "72;;", "172;", "7;", ";", "", "-72;", "72.0;", "7;2;"])
def test_only_the_exact_answer_with_its_eos_is_rewarded(task, completion):
    assert task.verify("72;", "72") == 1.0
    assert task.verify(completion, "72") == 0.0
