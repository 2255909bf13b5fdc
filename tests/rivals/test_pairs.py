"""A pair is one right and one wrong completion of the same prompt, each used once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core import Problem, Rollout, sample_groups
from grpo_core.rivals.pairs import make_pairs

groups = st.integers(2, 6).flatmap(lambda size: st.lists(st.lists(st.booleans(), min_size=size, max_size=size), min_size=1))


def numbered(rewards, start=0, prompt_mask=None):
    """A rollout whose completion i consists of the number start + i, and whose prompt is the number of its group."""
    rewards = torch.tensor(rewards, dtype=torch.float32)
    rows = start + torch.arange(rewards.numel())
    group = start + torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    ids, mask = torch.stack([rows, rows, rows], dim=1), torch.arange(3) <= rows[:, None] % 3
    return Rollout(group[:, None].expand(-1, 2), ids, mask, torch.zeros(ids.shape), rewards, 1.0, prompt_mask=prompt_mask)


def pairs_by_hand(rewards):
    found = []
    for i, group in enumerate(rewards):
        right = [i * len(group) + j for j, reward in enumerate(group) if reward]
        wrong = [i * len(group) + j for j, reward in enumerate(group) if not reward]
        found += list(zip(right, wrong))
    return found


@given(groups)
def test_pairs_are_those_of_the_plain_definition(rewards):
    expected = pairs_by_hand(rewards)
    if not expected:
        with pytest.raises(ValueError, match="no group has both a right and a wrong completion"):
            make_pairs([numbered(rewards)])
        return
    pairs = make_pairs([numbered(rewards)])
    assert list(zip(pairs.chosen_ids[:, 0].tolist(), pairs.rejected_ids[:, 0].tolist())) == expected
    assert pairs.prompt_ids[:, 0].tolist() == [right // len(rewards[0]) for right, _ in expected]
    for ids, mask in ((pairs.chosen_ids, pairs.chosen_mask), (pairs.rejected_ids, pairs.rejected_mask)):
        assert torch.equal(mask, torch.arange(3) <= ids[:, :1] % 3)
    assert len(pairs) == len(expected) and pairs.prompt_mask is None


def test_sampled_pairs_hold_a_right_and_a_wrong_answer_to_their_prompt(letters, tiny):
    generator = torch.Generator().manual_seed(0)
    pairs = make_pairs([sample_groups(tiny(), letters, letters.problems, 16, 1.5, generator=generator) for _ in range(3)])
    answers = {problem.prompt: problem.answer for problem in letters.problems}
    for prompt, real, chosen, rejected in zip(pairs.prompt_ids, pairs.prompt_mask, pairs.chosen_ids, pairs.rejected_ids):
        answer = answers[letters.decode(prompt[real].tolist())]
        assert letters.verify(letters.decode(chosen.tolist()), answer) == 1
        assert letters.verify(letters.decode(rejected.tolist()), answer) == 0
    assert len(pairs) > 5


def test_pairs_of_several_rollouts_follow_one_another_and_a_part_is_made_of_pairs():
    pairs = make_pairs([numbered([[1, 0], [0, 0]]), numbered([[1, 1]], 10), numbered([[0, 1], [1, 0]], 20)])
    assert pairs.chosen_ids[:, 0].tolist() == [0, 21, 22] and pairs.rejected_ids[:, 0].tolist() == [1, 20, 23]
    for rows in (slice(1, 3), torch.tensor([1, 2])):
        assert pairs[rows].chosen_ids[:, 0].tolist() == [21, 22] and pairs[rows].prompt_ids[:, 0].tolist() == [20, 21]
        assert pairs[rows].prompt_mask is None
    masked = make_pairs([numbered([[1, 0]], prompt_mask=torch.tensor([[False, True]] * 2))])
    assert masked[torch.tensor([0])].prompt_mask.tolist() == [[False, True]]


def test_rollouts_whose_prompts_are_padded_differently_are_padded_alike(letters, tiny):
    """The first holds one length only and has no mask; the second is padded."""
    policy, generator = tiny(), torch.Generator().manual_seed(0)
    short, mixed = [Problem("b", "")], [Problem("b", ""), Problem("bba", "")]
    pairs = make_pairs([sample_groups(policy, letters, p, 32, 1.5, generator=generator) for p in (short, mixed)])
    texts = {letters.decode(ids[real].tolist()) for ids, real in zip(pairs.prompt_ids, pairs.prompt_mask)}
    assert texts == {"b", "bba"} and pairs.prompt_ids.shape == (len(pairs), 3)


def test_graded_rewards_pair_the_best_with_the_others():
    pairs = make_pairs([numbered([[0.2, 0.9, 0.5, 0.9]])])
    assert list(zip(pairs.chosen_ids[:, 0].tolist(), pairs.rejected_ids[:, 0].tolist())) == [(1, 0), (3, 2)]


@pytest.mark.parametrize("rewards", [[[1, 1], [0, 0]], [[0, 0, 0]], [[1, 1]]])
def test_no_pairs_is_an_error_that_says_what_to_do(rewards):
    with pytest.raises(ValueError, match="sample more, or from a better policy"):
        make_pairs([numbered(rewards)])
