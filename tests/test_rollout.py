"""Rollouts: the sampler draws from the distribution that the scorer describes, token for token, prompt for prompt."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from grpo_core import Problem, group_advantages, sample_groups, token_log_probs
from grpo_core.rollout import positions, through_eos

TEMPERATURES = [0.5, 1.0, 1.7]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Table(nn.Module):
    """A policy that reads its logits off a table, by position; it knows nothing of masks, positions or caches."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, token_ids):
        return self.logits[: token_ids.shape[1]].expand(len(token_ids), -1, -1)


class HuggingFaceLike(nn.Module):
    """A policy that returns an object with `.logits` and calls its arguments what Hugging Face calls them."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return SimpleNamespace(logits=self.policy(input_ids, attention_mask, position_ids))


# ---- the mask


@pytest.mark.parametrize(
    "row, expected",
    [
        ([5, 6, 2, 0, 0], [1, 1, 1, 0, 0]),
        ([5, 6, 7, 8, 9], [1, 1, 1, 1, 1]),
        ([2, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        ([5, 2, 6, 2, 0], [1, 1, 0, 0, 0]),
        ([7, 9, 2, 2, 2], [1, 1, 1, 0, 0]),
        ([5, 5, 5, 5, 2], [1, 1, 1, 1, 1]),
        ([2], [1]),
    ],
)
def test_mask_runs_through_the_first_eos(row, expected):
    assert through_eos(torch.tensor([row]), eos_id=2).int().tolist() == [expected]


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1))
def test_mask_ends_where_a_reader_would_stop(rows):
    lengths = [row.index(2) + 1 if 2 in row else 4 for row in rows]
    assert through_eos(torch.tensor(rows), eos_id=2).tolist() == [[t < n for t in range(4)] for n in lengths]


# ---- scoring


def test_each_token_is_scored_by_the_logits_before_it():
    text = torch.tensor([3, 1, 4, 1, 5, 2, 6, 0])
    knows_it_by_heart = Table(50 * nn.functional.one_hot(text.roll(-1), 7).float())
    scores = token_log_probs(knows_it_by_heart, text[None, :3], text[None, 3:])
    assert_close(scores, torch.zeros(1, 5), atol=1e-6, rtol=0)


def test_scoring_divides_the_logits_by_the_temperature():
    policy, prompts, tokens = Table(torch.tensor([[2.0, 1.0, 0.0]] * 2)), torch.zeros(3, 1).long(), torch.arange(3)[:, None]
    right, wrong = token_log_probs(policy, prompts, tokens, 0.5), token_log_probs(policy, prompts, tokens)
    assert_close(right.flatten(), torch.tensor([4.0, 2.0, 0.0]).log_softmax(0))
    assert_close((wrong - right).exp().flatten(), torch.tensor([0.767, 2.086, 5.671]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("prompt", ["ab", "bba", "b"])
def test_scores_are_the_exact_log_probs_and_sum_to_one(letters, tiny, temperature, prompt):
    policy, (ids, mask) = tiny(), letters.completions()
    scores = token_log_probs(policy, torch.tensor([letters.encode(prompt)] * len(ids)), ids, temperature)
    assert_close(scores, letters.log_probs(policy, prompt, temperature))
    assert_close(scores.where(mask, 0.0).sum(1).exp().sum().item(), 1.0)


def test_sharing_a_prompt_changes_neither_values_nor_gradients(tiny, gradient):
    policy, prompts = tiny(), torch.tensor([[0, 1], [0, 1], [1, 0], [0, 1], [0, 1], [0, 1], [1, 1]])
    completions = torch.randint(3, (7, 3), generator=seeded())
    together = token_log_probs(policy, prompts, completions, 0.7)
    alone = torch.cat([token_log_probs(policy, p[None], c[None], 0.7) for p, c in zip(prompts, completions)])
    unshared = token_log_probs(HuggingFaceLike(policy), prompts, completions, 0.7)
    assert_close(together, alone)
    assert_close(together, unshared)
    assert_close(gradient(together.sin().sum(), policy), gradient(unshared.sin().sum(), policy))


@pytest.mark.parametrize("wrap", [lambda policy: policy, HuggingFaceLike])
def test_mixed_prompt_lengths_score_as_one_row_at_a_time(tiny, gradient, wrap):
    policy, completions = tiny(), torch.randint(3, (3, 3), generator=seeded())
    prompts = [[0, 1, 1, 0, 2, 1], [1, 0], [2, 0, 1, 1]]
    padded = torch.tensor([[1] * (6 - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (6 - len(row)) + [1] * len(row) for row in prompts])
    together = token_log_probs(wrap(policy), padded, completions, 0.7, mask)
    alone = torch.cat([token_log_probs(policy, torch.tensor([p]), c[None], 0.7) for p, c in zip(prompts, completions)])
    assert_close(together, alone)
    assert_close(gradient(together.sin().sum(), policy), gradient(alone.sin().sum(), policy))


def test_positions_count_real_tokens_only():
    assert positions(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0] * 4]


@pytest.mark.parametrize("training", [True, False])
def test_scoring_is_free_of_dropout_and_leaves_the_mode_alone(training):
    policy = nn.Sequential(nn.Embedding(3, 16), nn.Dropout(0.5), nn.Linear(16, 3)).train(training)
    prompts, completions = torch.zeros(5, 2, dtype=torch.long), torch.randint(3, (5, 4), generator=seeded())
    assert torch.equal(token_log_probs(policy, prompts, completions), token_log_probs(policy, prompts, completions))
    assert policy.training == policy[1].training == training


def test_mode_survives_an_error(tiny):
    policy = tiny().train()
    with pytest.raises(ValueError, match="context"):
        token_log_probs(policy, torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))
    assert policy.training


@pytest.mark.parametrize(
    "dtype, expected",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_log_probs_are_never_computed_in_half_precision(dtype, expected):
    logits = torch.tensor([[3.0, 0.25, -2.0]] * 3)
    scores = token_log_probs(Table(logits.to(dtype)), torch.tensor([[0]]), torch.tensor([[1, 2]]), 0.7)
    assert scores.dtype == expected
    assert_close(scores.float(), (logits / 0.7).log_softmax(1)[[0, 1], [1, 2]][None])


# ---- sampling


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_completions_come_as_often_as_their_exact_probability_says(letters, tiny, temperature):
    policy, n = tiny(), 4000
    rollout = sample_groups(policy, letters, letters.problems, n, temperature, generator=seeded())
    ids, mask = letters.completions()
    for problem, group in zip(letters.problems, rollout.completion_ids.view(3, n, 3)):
        expected = n * letters.log_probs(policy, problem.prompt, temperature).where(mask, 0.0).sum(1).exp()
        counts = (group[:, None] == ids).all(2).sum(0)
        assert counts.sum() == n
        assert ((counts - expected) ** 2 / expected).sum() < 45  # Chi-square, 14 degrees of freedom: p = 4e-5.


@pytest.mark.parametrize("prompts", [["ab", "ba", "bb"], ["bbab", "a", "ba"]])
def test_cached_sampler_draws_what_an_uncached_one_draws(letters, tiny, prompts):
    policy, generator, rows = tiny(), seeded(), [letters.encode(prompt) for prompt in prompts for _ in range(4)]
    for _ in range(3):
        logits = torch.stack([policy(torch.tensor([row]))[0, -1] for row in rows])
        drawn = torch.multinomial((logits / 0.7).softmax(1), 1, generator=generator).flatten().tolist()
        rows = [[*row, 2 if 2 in row else token] for row, token in zip(rows, drawn)]
    rollout = sample_groups(policy, letters, [Problem(p, "") for p in prompts], 4, 0.7, generator=seeded())
    assert rollout.completion_ids.tolist() == [row[-3:] for row in rows]


@pytest.mark.parametrize("prompts", [["ab", "ba"], ["bbab", "a"]])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_ratio_is_exactly_one_before_the_first_step(letters, tiny, prompts, dropout, temperature):
    policy = tiny().float()
    policy.norm = nn.Sequential(policy.norm, nn.Dropout(dropout))
    r = sample_groups(policy, letters, [Problem(p, "") for p in prompts], 8, temperature, generator=seeded())
    assert policy.training
    assert torch.equal(token_log_probs(policy, r.prompt_ids, r.completion_ids, r.temperature, r.prompt_mask), r.old_log_probs)


@pytest.mark.parametrize("prompts", [["ab", "ba"], ["bbab", "a"]])
def test_old_log_probs_are_those_of_the_distribution_that_was_sampled(letters, tiny, prompts):
    policy, ids = tiny(), letters.completions()[0].tolist()
    rollout = sample_groups(policy, letters, [Problem(p, "") for p in prompts], 8, 0.7, generator=seeded())
    exact = [letters.log_probs(policy, prompt, 0.7) for prompt in prompts for _ in range(8)]
    assert_close(rollout.old_log_probs, torch.stack([e[ids.index(c)] for e, c in zip(exact, rollout.completion_ids.tolist())]))


def test_rows_of_a_group_are_neighbors(letters, tiny):
    letters.verify = lambda completion, answer: float(answer)
    problems = [Problem(prompt, str(i)) for i, prompt in enumerate(["ab", "bb", "ba"])]
    rollout = sample_groups(tiny(), letters, problems, 4, generator=seeded())
    assert rollout.rewards.tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert (group_advantages(rollout.rewards) == 0).all()
    assert rollout.prompt_ids.tolist() == [letters.encode(p.prompt) for p in problems for _ in range(4)]
    assert (rollout.problems, rollout.group_size) == (problems, 4)


def test_completions_of_a_group_are_different_draws(letters, tiny):
    rollout = sample_groups(tiny(), letters, letters.train, 8, 1.7, generator=seeded())
    assert all(len({tuple(row) for row in group}) > 1 for group in rollout.completion_ids.view(3, 8, 3).tolist())


def test_generator_is_the_only_source_of_randomness_and_moves_on(letters, tiny):
    def draw(generator):
        return sample_groups(policy, letters, letters.problems, 16, 1.0, generator=generator).completion_ids

    policy, generator = tiny(), seeded()
    first, second = draw(generator), draw(generator)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(first, draw(seeded())) and not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_mask_texts_and_rewards_describe_the_completions(letters, tiny):
    rollout = sample_groups(tiny(), letters, letters.problems, 16, 1.7, generator=seeded())
    answers = [problem.answer for problem in letters.problems for _ in range(16)]
    for ids, mask, text, reward, answer in zip(
        rollout.completion_ids, rollout.completion_mask, rollout.texts, rollout.rewards.flatten(), answers
    ):
        assert "".join("ab;"[i] for i in ids[mask]) == text
        assert (ids[~mask] == 2).all()
        assert reward == (text == answer + ";")
    assert {1.0, 0.0} == set(rollout.rewards.flatten().tolist())


def test_completion_that_never_ends_is_trained_whole_and_earns_nothing(letters, tiny):
    policy = tiny()
    policy.head.bias.data[2] = -1e4
    rollout = sample_groups(policy, letters, letters.problems, 8, generator=seeded())
    assert rollout.completion_mask.all() and not rollout.rewards.any()


def test_completions_are_cut_at_the_asked_length(letters, tiny):
    assert sample_groups(tiny(), letters, letters.problems, 2).completion_ids.shape == (6, 3)
    assert sample_groups(tiny(), letters, letters.problems, 2, max_new_tokens=1).completion_ids.shape == (6, 1)


# ---- bad input


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_must_be_positive_and_greedy_has_its_own_function(letters, tiny, temperature):
    with pytest.raises(ValueError, match=r"temperature must be .*greedy"):
        sample_groups(tiny(), letters, letters.problems, temperature=temperature)
    with pytest.raises(ValueError, match=r"temperature must be .*greedy"):
        token_log_probs(tiny(), torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), temperature)


@pytest.mark.parametrize(
    "problems, arguments, message",
    [
        ([Problem("a", "")], {"group_size": 1}, "group_size"),
        ([Problem("a", "")], {"group_size": 0}, "group_size"),
        ([], {}, "problems"),
        ([Problem("a" * 9, "")], {}, "context"),
        ([Problem("a" * 9, ""), Problem("b", "")], {}, "context"),
        ([Problem("a", "")], {"max_new_tokens": 99}, "max_new_tokens"),
        ([Problem("a", "")], {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_sampling_refuses_what_cannot_work(letters, tiny, problems, arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_groups(tiny(), letters, problems, **arguments)


def test_sampling_refuses_characters_outside_the_vocabulary(task, tiny):
    with pytest.raises(ValueError, match=r"vocabulary.*'x'"):
        sample_groups(tiny(vocab_size=13), task, [Problem("2x3=", "6")])


def test_prompts_and_completions_need_the_same_number_of_rows(tiny):
    with pytest.raises(ValueError, match="2 prompts but 3 completions"):
        token_log_probs(tiny(), torch.zeros(2, 1).long(), torch.zeros(3, 1).long())


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_lost_weights_are_noticed_while_sampling(letters, tiny, lost):
    policy = tiny()
    policy.head.bias.data[0] = lost
    with pytest.raises(FloatingPointError, match="logits"):
        sample_groups(policy, letters, letters.problems)
