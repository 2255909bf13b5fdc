"""The Sampler widget: what a reader types, draws and sees."""

import re

import pytest
import torch

from grpo_core import Addition, Problem, sample_groups, warm_start
from grpo_core.lab.sampler import SHOWN, Sampler, read_sum, token_probabilities, verdict


@pytest.fixture(scope="module")
def policy():
    return warm_start()


@pytest.fixture
def sampler(policy):
    return Sampler(policy=policy)


def shown(widget):
    return re.sub(r"<img.*?>", "", widget.html.value)


def test_shows_eight_completions_with_the_verifiers_verdict(sampler):
    for text, reward in zip(sampler.rollout.texts, sampler.rollout.rewards[0].tolist()):
        assert verdict(text, "72") == "✓ right" if reward else verdict(text, "72").startswith("✗")
        assert f">{text}<" in shown(sampler)
    assert len(sampler.rollout.texts) == 8
    assert f"{int(sampler.rollout.rewards.sum())} of 8 right" in shown(sampler)
    assert shown(sampler).count("✓ right") == int(sampler.rollout.rewards.sum())


def test_a_new_sum_is_asked_with_its_own_answer(sampler):
    sampler.text.value = "31+17"
    assert "The true answer is 48" in shown(sampler)
    assert sampler.rollout.problems == [Problem("31+17=", "48")]


def test_probabilities_are_those_of_the_policy_one_step_at_a_time(sampler, policy):
    """The oracle reads one prefix at a time, without batch or cache."""
    task = Addition()
    for written, _, candidates in sampler.steps:
        logits = policy(torch.tensor([task.encode("24+48=" + written)]))[0, -1]
        weights = (logits / 0.7).exp()
        for name, chance in candidates:
            assert chance == pytest.approx((weights[task.vocab.index(name)] / weights.sum()).item(), abs=1e-5)


def test_the_steps_spell_the_first_completion(sampler):
    assert "".join(drawn for _, drawn, _ in sampler.steps) == sampler.rollout.texts[0]
    for _, drawn, candidates in sampler.steps:
        assert len(candidates) == SHOWN
        assert drawn in [name for name, _ in candidates]


def test_an_unlikely_draw_is_among_its_candidates(policy, task):
    """At temperature 2 low ranks are drawn; no draw may be lost from the picture."""
    generator, ranks = torch.Generator().manual_seed(0), []
    for _ in range(60):
        rollout = sample_groups(policy, task, [task.example], temperature=2.0, generator=generator)
        for _, drawn, candidates in token_probabilities(policy, task, rollout):
            names, chances = zip(*candidates)
            assert drawn in names and len(set(names)) == SHOWN
            assert list(chances) == sorted(chances, reverse=True)
            ranks.append(names.index(drawn))
    assert max(ranks) == SHOWN - 1


def test_ask_again_draws_new_completions_and_the_temperature_alone_does_not(sampler):
    first = sampler.rollout.texts
    sampler.temperature.value = 0.8
    sampler.temperature.value = 0.7
    assert sampler.rollout.texts == first
    different = []
    for _ in range(5):
        sampler.again.click()
        different.append(sampler.rollout.texts)
    assert len({tuple(texts) for texts in [first, *different]}) > 3


def test_the_temperature_slider_sets_the_temperature(sampler):
    def certainty(temperature):
        """Probability of the likeliest first character: nothing random about it."""
        sampler.temperature.value = temperature
        assert sampler.rollout.temperature == temperature
        return max(chance for _, chance in sampler.steps[0][2])

    assert certainty(0.1) > 0.9 > certainty(0.7) > certainty(2.0) > 0.2


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("24+4x", "cannot read x"),
        ("24-48=", "cannot read -"),
        ("<b>1</b>+2", "cannot read &lt; b &gt; /"),
        ("٣+4", "cannot read ٣"),
        ("", "not a sum of two numbers"),
        ("24", "not a sum of two numbers"),
        ("1+2+3", "not a sum of two numbers"),
        ("24+48;", "not a sum of two numbers"),
        ("12345+1", "too long"),
    ],
)
def test_a_bad_sum_is_explained_in_words(sampler, typed, words):
    sampler.text.value = typed
    assert "Not possible" in shown(sampler)
    assert words in shown(sampler)
    sampler.text.value = "24+48="
    assert "of 8 right" in shown(sampler)


@pytest.mark.parametrize(
    ("typed", "problem"),
    [("24+48", ("24+48=", "72")), (" 9 + 9 = ", ("9+9=", "18")), ("9999+9999", ("9999+9999=", "19998"))],
)
def test_sums_are_read_generously(typed, problem, sampler):
    assert read_sum(typed, Addition()) == Problem(*problem)
    sampler.text.value = typed
    assert "of 8 right" in shown(sampler)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("7+5", "only taught two-digit numbers"),
        ("24+48", "in the training part"),
        ("04+48", "only taught two-digit numbers"),
        ("100+20", "only taught two-digit numbers"),
    ],
)
def test_says_what_the_policy_was_taught(sampler, typed, words):
    sampler.text.value = typed
    assert words in shown(sampler)


def test_held_out_sums_were_never_trained_on_in_either_order(sampler):
    prompt = next(p.prompt for p in Addition().held_out if p.prompt[:2] != p.prompt[3:5])
    for typed in (prompt, f"{prompt[3:5]}+{prompt[:2]}="):
        sampler.text.value = typed
        assert "never trained on" in shown(sampler)


def test_verdicts():
    assert verdict("72;", "72") == "✓ right"
    assert [verdict(text, "72") for text in ("73;", "172;", ";", "072;")] == ["✗ wrong"] * 4
    assert [verdict(text, "72") for text in ("72", "7212", "")] == ["✗ never ended"] * 3


def test_the_static_twin_needs_no_kernel_and_no_style(sampler):
    twin = sampler._repr_mimebundle_()[0]["text/html"]
    assert "24+48=" in twin and twin.count("<tr>") == 9 and "✗ wrong" in twin
    assert 'alt="Probabilities of the characters of ' in twin
    assert twin == Sampler(policy=sampler.policy)._repr_mimebundle_()[0]["text/html"]


def test_controls_have_names(sampler):
    assert [sampler.text.description, sampler.temperature.description] == ["sum", "temperature"]
    assert sampler.again.description == "ask again" and sampler.again.tooltip
