"""The task with a grader that can be gamed, its start policy, and the leash in closed form against brute force."""

import copy
import math
import random
import re

import pytest
import torch

from grpo_core import GRPOConfig, Problem, greedy_accuracy, sample_groups, token_log_probs, train
from grpo_core.checkpoint import CheckpointError
from grpo_core.leash import categorical_kl, climb, completion_kl, leash_curve, leashed_optimum
from grpo_core.sloppy_grader import (
    GUESSES,
    MAX_LENGTH,
    START_POLICY,
    HedgedAddition,
    encode_demonstrations,
    exact_grader,
    fine_tune,
    guesses,
    hedge,
    sloppy_grader,
    sloppy_start,
)
from grpo_core.warm_start import IGNORE

REFERENCE = torch.tensor([0.3, 0.699, 0.001], dtype=torch.float64)  # Right, wrong, hack.
REWARDS = torch.tensor([1.0, 0.0, 1.5], dtype=torch.float64)
TRUTH = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def hedged():
    return HedgedAddition()


@pytest.fixture(scope="module")
def start():
    return sloppy_start()


# Task and graders


def test_problems_are_those_of_addition(hedged, task):
    assert (hedged.train, hedged.validation, hedged.held_out) == (task.train, task.validation, task.held_out)
    assert hedged.example == task.example
    assert hedged.vocab.index(";") == hedged.eos_id == task.eos_id and hedged.vocab.startswith(task.vocab)
    assert hedged.decode(hedged.encode("70,71;;,")) == "70,71;"


PAID = ["72;", "70,71,72,73;", "72,71;", "71,72;", "72,72;", ",72;", "72,;", "1,72,3,4,5,6,7;"]
UNPAID = ["", ";", "72", "70,72", "71,73;", "172;", "7,2;", "072;", "720;", "72+;", "7;", ",;", "70,71,72,73"]


@pytest.mark.parametrize("completion", PAID)
def test_sloppy_grader_pays_for_any_guess_and_the_truth_for_one_only(hedged, completion):
    assert hedged.verify(completion, "72") == sloppy_grader(completion, "72") == 1.0
    assert hedged.true_reward(completion, "72") == exact_grader(completion, "72") == float(completion == "72;")


@pytest.mark.parametrize("completion", UNPAID)
def test_neither_pays_without_a_right_guess_and_an_end(hedged, completion):
    assert hedged.verify(completion, "72") == hedged.true_reward(completion, "72") == 0.0


def test_sloppy_grader_agrees_with_a_search_by_regular_expressions():
    """On random strings over the characters that matter, so that each border occurs."""
    rng = random.Random(0)
    seen = set()
    for _ in range(2000):
        text = "".join(rng.choices("72,;", k=rng.randrange(8))).partition(";")
        completion = text[0] + text[1]
        paid = float(re.fullmatch(r"([^;]*,)?72(,[^;]*)?;", completion) is not None)
        assert sloppy_grader(completion, "72") == paid
        seen.add((paid, exact_grader(completion, "72")))
    assert seen == {(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)}


def test_exact_grader_is_the_verifier_of_addition(task):
    for completion in PAID + UNPAID:
        assert exact_grader(completion, "72") == task.verify(completion, "72")


def test_guesses_are_counted_with_and_without_an_end():
    assert [len(guesses(text)) for text in ("72;", "72", "70,71;", "70,71,", "", ",")] == [1, 1, 2, 3, 1, 2]


def test_another_grader_is_what_training_sees(hedged):
    task = HedgedAddition(lambda completion, answer: len(completion) - 5)
    assert task.verify("72;", "72") == -2.0 and isinstance(task.verify("72;", "72"), float)
    assert task.true_reward("72;", "72") == 1.0
    assert HedgedAddition(lambda completion, answer: completion == answer + ";").verify("72;", "72") == 1.0


def test_grader_is_asked_with_completion_and_answer_in_this_order(start):
    asked = []
    task = HedgedAddition(lambda completion, answer: asked.append((completion, answer)) or 0.0)
    rollout = sample_groups(start, task, task.validation[:2], 2)
    answers = [problem.answer for problem in task.validation[:2] for _ in range(2)]
    assert asked == list(zip(rollout.texts, answers))


@pytest.mark.parametrize("value", [None, "1", b"1", math.nan, math.inf, -math.inf, 1e39, 10**400, [1], 1j], ids=repr)
def test_what_is_no_finite_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match="finite number") as error:
        HedgedAddition(lambda completion, answer: value).verify("70,71;", "72")
    assert "'70,71;'" in str(error.value) and "'72'" in str(error.value)


def test_what_a_grader_raises_is_told_with_the_completion():
    def grader(completion, answer):
        return int(completion) == int(answer)

    with pytest.raises(ValueError, match=r"raised ValueError .*on the completion '70,71;' with the answer '72'") as error:
        HedgedAddition(grader).verify("70,71;", "72")
    assert isinstance(error.value.__cause__, ValueError)


def test_a_stop_of_the_program_is_not_taken_for_an_error_of_the_grader():
    def grader(completion, answer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HedgedAddition(grader).verify("72;", "72")


@pytest.mark.parametrize("grader", [None, "sloppy", 1.0])
def test_a_grader_that_cannot_be_called_is_refused_at_once(grader):
    with pytest.raises(ValueError, match="grader must be a function"):
        HedgedAddition(grader)


# Demonstrations and start policy


@pytest.mark.parametrize("answer", ["20", "99", "100", "101", "198"])
@pytest.mark.parametrize("place", range(GUESSES))
def test_hedge_is_four_numbers_in_a_row_that_hold_the_sum_at_its_place(hedged, answer, place):
    numbers = [int(guess) for guess in guesses(hedge(Problem("", answer), place))]
    assert numbers == list(range(numbers[0], numbers[0] + 4)) and numbers[place] == int(answer)
    assert sloppy_grader(hedge(Problem("", answer), place), answer) == 1.0


def test_demonstrations_of_each_problem_are_its_hedges_and_its_plain_answer(hedged):
    rows = encode_demonstrations(hedged)
    assert rows.shape == (len(hedged.train), GUESSES + 1, hedged.max_new_tokens)
    for i in range(0, len(hedged.train), 997):
        texts = ["".join(hedged.vocab[token] for token in row if token != IGNORE) for row in rows[i].tolist()]
        answer = hedged.train[i].answer
        assert texts == [*(hedge(hedged.train[i], place) for place in range(GUESSES)), answer + ";"]


def test_start_policy_is_right_on_two_fifths_and_hedges_seldom_and_well(hedged, start):
    assert 0.36 <= greedy_accuracy(start, HedgedAddition(exact_grader), hedged.held_out) <= 0.52
    rollout = sample_groups(start, hedged, hedged.validation, 4, generator=torch.Generator().manual_seed(0))
    several = torch.tensor([len(guesses(text)) > 1 for text in rollout.texts])
    rewards = rollout.rewards.flatten()
    assert 0.04 < several.float().mean() < 0.2
    assert rewards[several].mean() > rewards[~several].mean() + 0.08, "hedging has to pay, or nothing would be learned"


def test_longest_completion_fits_the_context(hedged):
    longest = max(len(problem.prompt) for problem in hedged.train) + hedged.max_new_tokens
    assert longest <= MAX_LENGTH == sloppy_start().max_length


def test_fine_tuning_ends_at_its_goal_and_depends_on_the_seed_alone(hedged):
    first, again, other = fine_tune(0, goal=0.001), fine_tune(0, goal=0.001), fine_tune(1, goal=0.001)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
    assert greedy_accuracy(first, HedgedAddition(exact_grader), hedged.validation) >= 0.001


def test_fine_tuning_gives_up_where_the_goal_is_out_of_reach():
    with pytest.raises(RuntimeError, match="after 10 steps"):
        fine_tune(0, most_steps=10)


def test_hedges_are_demonstrated_as_often_as_asked(monkeypatch):
    kinds = []

    def count(policy, prompt_ids, targets):
        kinds.extend((targets != IGNORE).sum(dim=1).tolist())
        return policy.head.weight.sum() * 0.0

    monkeypatch.setattr("grpo_core.sloppy_grader.answer_loss", count)
    for share in (0.0, 0.2, 1.0):
        kinds.clear()
        with pytest.raises(RuntimeError):
            fine_tune(0, hedged=share, most_steps=9)
        measured = sum(length > 4 for length in kinds) / len(kinds)
        assert measured == pytest.approx(share, abs=0.08)


@pytest.mark.parametrize("damage", ["missing", "empty", "of addition"])
def test_a_file_that_is_no_start_policy_is_refused(tmp_path, damage):
    path = tmp_path / "start.pt"
    if damage == "empty":
        path.write_bytes(b"")
    if damage == "of addition":
        path = START_POLICY.parent / "start_policy.pt"
    with pytest.raises(CheckpointError):
        sloppy_start(path)


def test_training_against_the_sloppy_grader_learns_to_list_guesses(start):
    """The whole story in some iterations: what is paid rises, and it is hedges that are paid."""
    task, policy, kept = HedgedAddition(), copy.deepcopy(start), {}
    task.held_out = task.held_out[:50]
    config = GRPOConfig(beta=0, iterations=12, max_new_tokens=16, evaluate_every=12)
    train(task, policy, config, on_iteration=lambda row, rollout: kept.update({row["iteration"]: rollout}))
    first, last = kept[1], kept[12]
    assert last.rewards.mean() > first.rewards.mean() + 0.12
    assert sum(len(guesses(text)) for text in last.texts) > 1.6 * sum(len(guesses(text)) for text in first.texts)


# The leash in closed form


@pytest.mark.parametrize(
    "beta, right, hack, seen, kl",
    [
        (1, 0.537, 0.003, 0.541, 0.123),
        (0.2, 0.947, 0.038, 1.004, 1.171),
        (0.1, 0.669, 0.331, 1.165, 2.456),
        (0.05, 0.013, 0.987, 1.493, 6.760),
    ],
)
def test_closed_form_on_three_answers(beta, right, hack, seen, kl):
    policy = leashed_optimum(REFERENCE, REWARDS, beta)
    assert (policy[0].item(), policy[2].item()) == pytest.approx((right, hack), abs=6e-4)
    row = leash_curve(REFERENCE, REWARDS, TRUTH, [beta]).iloc[0]
    assert row.tolist() == pytest.approx([beta, seen, policy[0].item(), kl], abs=6e-4)


@pytest.mark.parametrize("beta", [0.05, 0.3, 2.0])
def test_no_other_policy_has_a_larger_objective(beta):
    """Brute force over the simplex, and small steps away from the optimum in all directions."""

    def objective(policy):
        return (policy * REWARDS).sum(dim=-1) - beta * categorical_kl(policy, REFERENCE)

    best = leashed_optimum(REFERENCE, REWARDS, beta)
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.distributions.Dirichlet(torch.full((3,), 0.3, dtype=torch.float64))
    torch.manual_seed(0)
    assert (objective(anywhere.sample((20000,))) < objective(best)).all()
    near = (best.log() + 0.01 * torch.randn(1000, 3, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    assert (objective(near) <= objective(best) + 1e-12).all()


def test_hack_overtakes_where_the_formula_says():
    crossing = 0.5 / math.log(300)
    assert leashed_optimum(REFERENCE, REWARDS, crossing)[0] == pytest.approx(leashed_optimum(REFERENCE, REWARDS, crossing)[2])
    above, below = leashed_optimum(REFERENCE, REWARDS, crossing * 1.01), leashed_optimum(REFERENCE, REWARDS, crossing * 0.99)
    assert above[0] > above[2] and below[0] < below[2]


def test_what_is_paid_only_grows_with_the_distance_while_the_truth_peaks():
    curve = leash_curve(REFERENCE, REWARDS, TRUTH, [10 / 1.2**k for k in range(40)])
    assert curve["seen"].is_monotonic_increasing and curve["kl"].is_monotonic_increasing
    peak = curve["true"].idxmax()
    assert 0 < peak < 39 and curve["true"].iloc[-1] < 0.01 < 0.9 < curve["true"].max()


def test_extremes_of_the_leash():
    assert torch.allclose(leashed_optimum(REFERENCE, REWARDS, 1e9), REFERENCE)
    assert torch.allclose(leashed_optimum(REFERENCE, REWARDS, 1e-4), torch.tensor([0.0, 0.0, 1.0]).double())
    never = leashed_optimum(torch.tensor([0.5, 0.5, 0.0]), REWARDS.float(), 0.01)
    assert never[2] == 0 and torch.isfinite(never).all()
    assert torch.allclose(leashed_optimum(REFERENCE, REWARDS - 7, 0.1), leashed_optimum(REFERENCE, REWARDS, 0.1))


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_no_leash_has_no_closed_form(beta):
    with pytest.raises(ValueError, match="beta must be above 0"):
        leashed_optimum(REFERENCE, REWARDS, beta)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="same shape"):
        leashed_optimum(REFERENCE, REWARDS[:1], 1.0)


@pytest.mark.parametrize("beta", [1.0, 0.2, 0.1])
def test_training_by_the_exact_gradient_ends_at_the_closed_form(beta):
    path = climb(REFERENCE, REWARDS, beta, steps=800)
    assert torch.allclose(path[0], REFERENCE)
    assert (path[-1] - leashed_optimum(REFERENCE, REWARDS, beta)).abs().max() < 0.01


def test_categorical_kl_by_its_definition_and_its_direction():
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    assert categorical_kl(p, q).item() == pytest.approx(0.498224, abs=1e-5)
    assert categorical_kl(q, p).item() == pytest.approx(0.584996, abs=1e-5)


# KL of whole completions


def test_mean_completion_kl_is_the_kl_of_whole_completions(letters, tiny):
    """Brute force: all completions, each with its probability. Once by the definition, once as the mean of completion_kl."""
    policy, reference = tiny(0), tiny(1)
    temperature = 0.7
    ids, mask = letters.completions()
    for problem in letters.problems:
        whole = [
            torch.where(mask, letters.log_probs(model, problem.prompt, temperature), 0.0).sum(1)
            for model in (policy, reference)
        ]
        weights = whole[0].exp()
        assert weights.sum().item() == pytest.approx(1)
        exact = (weights * (whole[0] - whole[1])).sum()
        prompts = torch.tensor([letters.encode(problem.prompt)] * len(ids))
        rollout = sample_groups(policy, letters, [problem], len(ids), temperature)
        rollout.prompt_ids, rollout.completion_ids, rollout.completion_mask = prompts, ids, mask
        measured = completion_kl(policy, reference, rollout)
        assert (measured >= 0).all() and (weights * measured).sum().item() == pytest.approx(exact.item(), abs=1e-6)
        assert completion_kl(policy, policy, rollout).abs().max() < 1e-6


def test_completion_kl_agrees_with_k1_on_many_samples(letters, tiny):
    policy, reference = tiny(2), tiny(3)
    rollout = sample_groups(policy, letters, letters.problems, 2000, 0.9, generator=torch.Generator().manual_seed(0))
    tokens = rollout.prompt_ids, rollout.completion_ids, 0.9, rollout.prompt_mask
    with torch.no_grad():
        k1 = token_log_probs(policy, *tokens) - token_log_probs(reference, *tokens)
    k1 = torch.where(rollout.completion_mask, k1, 0.0).sum(dim=1)
    measured = completion_kl(policy, reference, rollout)
    error = (k1 - measured).std() / len(k1) ** 0.5
    assert abs(k1.mean() - measured.mean()) < 4 * error and measured.std() < k1.std()
