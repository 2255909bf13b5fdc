"""The shell game: a split that gives nothing away, a verifier that reads one answer, a start policy that can but does not."""

import io
import re
from itertools import combinations, product

import pytest
import torch

from grpo_core import CheckpointError, TinyGPT, token_log_probs
from grpo_core.rollout import encode_prompts, sample_groups
from grpo_core.shell_game import (
    MAX_LENGTH,
    ShellGame,
    demonstration,
    demonstration_weights,
    encode_demonstrations,
    fine_tune,
    follow,
    full_chain,
    shell_game_start,
    steps_shown,
)
from grpo_core.task import Problem
from grpo_core.warm_start import START_POLICY as ADDITION
from grpo_core.warm_start import save_policy


@pytest.fixture(scope="module")
def game():
    return ShellGame()


@pytest.fixture(scope="module")
def start():
    return shell_game_start()


def by_hand(prompt):
    """The oracle: four cups on a table, one of which hides a ball, and hands that lift two cups at a time."""
    table = [place == int(prompt[0]) for place in (1, 2, 3, 4)]
    pairs = list(combinations(range(4), 2))
    seen = []
    for letter in prompt[1:]:
        left, right = pairs["abcdef".index(letter)]
        table[left], table[right] = table[right], table[left]
        seen.append(str(1 + table.index(True)))
    return "".join(seen)


# The game


def test_ball_is_where_hands_would_bring_it():
    for cup, *letters in product("1234", *["abcdef"] * 3):
        prompt = cup + "".join(letters)
        assert follow(prompt) == by_hand(prompt)


def test_each_answer_is_the_last_cup(game):
    for problem in game.train[::7] + game.validation + game.held_out:
        assert problem.answer == by_hand(problem.prompt)[-1]


def test_each_swap_undoes_itself():
    assert all(follow(cup + 2 * letter)[-1] == cup for cup, letter in product("1234", "abcdef"))


def test_no_sequence_of_swaps_is_in_two_parts(game):
    """Three of the four cups of a sequence give the fourth away, so it is the sequence that must not be shared."""
    parts = [{problem.prompt[1:] for problem in part} for part in (game.train, game.validation, game.held_out)]
    assert all(parts)
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])


@pytest.mark.parametrize("swaps", [(4, 5), (2,), (3, 4), (2, 6)])
def test_each_part_has_equally_many_of_each_length_and_each_cup(swaps):
    game = ShellGame(swaps)
    for part in (game.train, game.validation, game.held_out):
        counts = [sum(len(problem.prompt) == 1 + number for problem in part) for number in swaps]
        assert len(set(counts)) == 1 and sum(counts) == len(part) == len(set(part))
        assert {sum(problem.prompt[0] == cup for problem in part) for cup in "1234"} == {len(part) // 4}
    assert game.example in game.train


def test_split_is_fixed_and_has_400_each_for_choosing_and_reporting(game):
    assert ShellGame().held_out == game.held_out and ShellGame().train == game.train
    assert len(game.held_out) == len(game.validation) == 400


@pytest.mark.parametrize("swaps", [(), (1,), (4, 7), (0,), ("4",)])
def test_other_numbers_of_swaps_are_refused(swaps):
    with pytest.raises(ValueError, match="swaps must be some of"):
        ShellGame(swaps)


def test_text_and_ids_are_inverse_and_unknown_characters_are_named(game):
    text = "1234abcdef>=;"
    assert game.decode(game.encode(text)) == text and game.vocab[game.eos_id] == ";"
    assert game.decode(torch.tensor(game.encode(">1=2;;3;"))) == ">1=2;"
    with pytest.raises(ValueError, match="'g'"):
        game.encode("2g")


# The verifier


def test_verifier_agrees_with_a_regular_expression_on_every_short_completion(game):
    for length in range(6):
        for characters in product("13>=;", repeat=length):
            text = game.decode(game.encode("".join(characters)))
            assert game.verify(text, "3") == bool(re.fullmatch(r"[^=;]*=3;", text)), text


@pytest.mark.parametrize("completion", ["=4;", ">1>2>2=4;", ">3>3>3=4;", ">4=4;", ">=4;", ">1>2>2>4=4;"])
def test_a_right_answer_is_paid_whatever_steps_stand_before_it(game, completion):
    assert game.verify(completion, "4") == 1.0


@pytest.mark.parametrize(
    "completion", ["=3;", ">1>2>4=3;", ">4=1;", ">4;", "4;", "=4", ">1>2>2=4", "=1=4;", "=4=4;", "=14;", "=;", ";", "", "=4>;"]
)
def test_anything_else_is_not_paid(game, completion):
    """Among them: a right cup on the way but a wrong answer, two answers, an answer that was cut off."""
    assert game.verify(completion, "4") == 0.0


# Demonstrations


def test_demonstrations_are_true_right_and_short_enough(game):
    for problem in game.held_out[::5]:
        cups = by_hand(problem.prompt)
        for steps in range(len(cups)):
            text = demonstration(problem, steps)
            assert re.findall(r">(\d)", text) == list(cups[:steps]) and steps_shown(text) == steps
            assert game.verify(text, problem.answer) == 1.0
            assert len(game.encode(text)) == 3 + 2 * steps <= game.max_new_tokens
        assert full_chain(problem) == demonstration(problem, len(cups) - 1)
    assert max(len(full_chain(problem)) for problem in game.train) == game.max_new_tokens


@pytest.mark.parametrize("steps", [-1, 4, 5])
def test_a_demonstration_leaves_a_swap_for_the_answer(steps):
    with pytest.raises(ValueError, match="between 0 and 3"):
        demonstration(Problem("3bace", "4"), steps)


@pytest.mark.parametrize("swaps", [3, 4, 5, 6])
def test_most_demonstrations_answer_at_once_and_few_show_all(swaps):
    weights = demonstration_weights(swaps)
    assert len(weights) == swaps and sum(weights) == pytest.approx(1)
    assert weights[0] == 0.6 and weights[-1] == 0.1


def test_demonstrations_are_drawn_with_those_weights(game):
    texts = [game.decode(row) for row in encode_demonstrations(game, torch.Generator().manual_seed(3)).tolist()]
    assert all(game.verify(text, problem.answer) for text, problem in zip(texts, game.train))
    for swaps in (4, 5):
        steps = [steps_shown(text) for text, problem in zip(texts, game.train) if len(problem.prompt) == 1 + swaps]
        shares = [steps.count(k) / len(steps) for k in range(swaps)]
        assert shares == pytest.approx(demonstration_weights(swaps), abs=0.03)  # Four standard errors.


# The start policy


def test_shipped_policy_guesses_directly_and_knows_the_full_chain(game, start):
    rollout = sample_groups(start, game, game.validation, 4, 1.0, generator=torch.Generator().manual_seed(0))
    right = {0: [], "full": []}
    for i, (text, reward) in enumerate(zip(rollout.texts, rollout.rewards.flatten().tolist())):
        steps, swaps = steps_shown(text), len(rollout.problems[i // 4].prompt) - 1
        right.get("full" if steps == swaps - 1 else steps, []).append(reward)
    shares = {key: len(rewards) / len(rollout.texts) for key, rewards in right.items()}
    accuracy = {key: sum(rewards) / len(rewards) for key, rewards in right.items()}
    assert 0.5 < shares[0] < 0.7 and 0.05 < shares["full"] < 0.2
    assert 0.2 < accuracy[0] < 0.36 and accuracy["full"] > 0.85


def test_prompts_of_different_lengths_score_as_one_row_at_a_time(game, start):
    problems = [game.train[0], game.train[-1], game.train[1], game.train[-2]]
    assert len({len(problem.prompt) for problem in problems}) == 2
    texts = [full_chain(problems[0]), "=1;", ">1=2;", full_chain(problems[3])]
    longest = max(map(len, texts))
    ids = torch.tensor([game.encode(text + ";" * (longest - len(text))) for text in texts])
    prompt_ids, mask = encode_prompts(game, problems, "cpu")
    together = token_log_probs(start, prompt_ids, ids, prompt_mask=mask)
    for row, problem, text, together_row in zip(ids, problems, texts, together):
        alone = token_log_probs(start, torch.tensor([game.encode(problem.prompt)]), row[None])[0]
        assert torch.allclose(together_row[: len(text)], alone[: len(text)], atol=1e-4)


def test_each_call_gives_a_policy_of_its_own():
    first, second = shell_game_start(), shell_game_start()
    with torch.no_grad():
        first.head.bias.add_(1)
    assert not torch.equal(first.head.bias, second.head.bias)


def test_another_policy_does_not_pass_for_it(tmp_path):
    save_policy(TinyGPT(13, max_length=MAX_LENGTH + 1), tmp_path / "longer.pt")
    for path in (ADDITION, tmp_path / "longer.pt"):
        with pytest.raises(CheckpointError, match="ShellGame"):
            shell_game_start(path)
    with pytest.raises(CheckpointError, match="no file"):
        shell_game_start(tmp_path / "none.pt")


def weights(policy):
    buffer = io.BytesIO()
    torch.save(policy.state_dict(), buffer)
    return buffer.getvalue()


def test_fine_tuning_gives_the_same_policy_again_whatever_ran_before():
    game = ShellGame((2, 3))
    torch.rand(7)
    first = weights(fine_tune(game, seed=3, steps=2))
    torch.manual_seed(8)
    assert weights(fine_tune(game, seed=3, steps=2)) == first
    assert weights(fine_tune(game, seed=4, steps=2)) != first


def test_first_steps_follow_the_recipe_on_every_processor(game):
    losses = [chain_loss(fine_tune(game, steps=steps), game) for steps in (0, 10, 30)]
    assert losses == pytest.approx([2.7174, 1.2726, 0.9646], abs=2e-3)


def chain_loss(policy, game):
    """Mean negative log-prob of the full chains of the validation problems of four swaps."""
    problems = game.validation[:200]
    prompt_ids = torch.tensor([game.encode(problem.prompt) for problem in problems])
    ids = torch.tensor([game.encode(full_chain(problem)) for problem in problems])
    with torch.no_grad():
        return -token_log_probs(policy, prompt_ids, ids).mean().item()


def test_fine_tuning_never_reads_a_problem_that_is_only_for_measuring():
    class Watched(ShellGame):
        seen = ()

        def encode(self, text):
            self.seen = {*self.seen, text[1:]}
            return super().encode(text)

    game = Watched((2, 3))
    fine_tune(game, steps=2)
    kept_back = {problem.prompt[1:] for problem in game.held_out + game.validation}
    assert kept_back and game.seen.isdisjoint(kept_back)
    assert {problem.prompt[1:] for problem in game.train} <= game.seen
