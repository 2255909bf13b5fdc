"""LeashExplorer: exact KL over the vocabulary, estimates of the same tokens, and what the controls show."""

import copy
import html
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from grpo_core import Addition, kl_estimate, sample_groups, token_log_probs, warm_start
from grpo_core.lab.leash_explorer import OWN, STALE, STEPS, Distance, LeashExplorer, interpolate, vocabulary_log_probs


@pytest.fixture(scope="module")
def start():
    return warm_start()


@pytest.fixture(scope="module")
def moved(start):
    """The start policy with noise on its weights: far enough away that all numbers differ."""
    policy, generator = copy.deepcopy(start), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
    return policy


@pytest.fixture
def explorer(start, moved):
    return LeashExplorer(start, moved, Addition(), prompts=16)


@pytest.fixture(scope="module")
def rollout(moved):
    task = Addition()
    return sample_groups(moved, task, task.validation[:6], 2, generator=torch.Generator().manual_seed(0))


def table(widget):
    cells = [re.findall("<td><span>(.*?)</span></td>", row) for row in re.findall("<tr>(.*?)</tr>", widget.html.value)]
    return {row[0]: [html.unescape(cell) for cell in row[1:]] for row in cells if row}


def number(cell):
    return float(cell.replace("−", "-").replace(",", "").lstrip("±").rstrip("%"))


def test_log_probs_over_the_vocabulary_hold_those_of_the_sampled_tokens(moved, rollout):
    everything = vocabulary_log_probs(moved, rollout)
    assert torch.allclose(everything.exp().sum(-1), torch.ones(everything.shape[:2]), atol=1e-5)
    sampled = everything.gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1)
    expected = token_log_probs(moved, rollout.prompt_ids, rollout.completion_ids, rollout.temperature).detach()
    assert torch.allclose(sampled, expected, atol=1e-5)


def test_exact_kl_is_torchs(start, moved, rollout):
    p, q = vocabulary_log_probs(moved, rollout), vocabulary_log_probs(start, rollout)
    expected = nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)  # torch's order: KL(second ‖ first).
    assert torch.allclose(Distance.measure(moved, start, rollout).exact, expected, atol=1e-6)


def test_a_policy_is_at_distance_zero_from_itself(moved, rollout):
    tokens = Distance.measure(moved, moved, rollout).tokens()
    assert all(values.abs().max() == 0 for values in tokens.values())


def test_only_tokens_within_the_mask_count(start, moved, rollout):
    tokens = Distance.measure(moved, start, rollout).tokens()
    assert {len(values) for values in tokens.values()} == {int(rollout.completion_mask.sum())}
    assert int(rollout.completion_mask.sum()) < rollout.completion_mask.numel()


def test_estimates_average_to_the_exact_kl_of_one_place(start, moved, rollout):
    """At one place, the mean of each estimator over all tokens is known: k1 and k3 hit the KL, k2 does not."""
    p, q = (vocabulary_log_probs(policy, rollout)[0, 0].double() for policy in (moved, start))
    exact = Distance.measure(moved, start, rollout).exact[0, 0].item()
    mean = {kind: (p.exp() * kl_estimate(p, q, kind)).sum().item() for kind in ("k1", "k2", "k3")}
    assert mean["k1"] == pytest.approx(exact, rel=1e-4) and mean["k3"] == pytest.approx(exact, rel=1e-4)
    assert mean["k2"] != pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 2.0])
def test_interpolation_is_a_straight_line_through_both(start, moved, share):
    before = [weight.clone() for weight in start.parameters()]
    policy = interpolate(start, moved, share)
    for weight, a, b in zip(policy.parameters(), start.parameters(), moved.parameters()):
        assert torch.allclose(weight, a + share * (b - a), atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, start.parameters()))


def test_distance_zero_is_the_reference_and_it_grows(explorer):
    exact = [explorer.means(step)["exact"] for step in range(len(STEPS))]
    assert exact[0] == 0 and all(a < b for a, b in pairwise(exact[:6]))


@pytest.mark.parametrize("source", [OWN, STALE])
@pytest.mark.parametrize("step", [0, 5, 10])
def test_table_shows_means_of_the_chosen_tokens(explorer, source, step):
    explorer.source.value, explorer.step.value = source, step
    tokens = explorer.distances[source][step].tokens()
    for kind in ("k1", "k2", "k3"):
        mean, exact, error, std, below, largest = map(number, table(explorer)[kind])
        values = tokens[kind].double().numpy()
        assert mean == pytest.approx(values.mean(), abs=6e-4, rel=1e-2)
        assert exact == pytest.approx(tokens["exact"].numpy().mean(), abs=6e-4)
        assert std == pytest.approx(values.std(ddof=1), abs=6e-3, rel=1e-2)
        assert error == pytest.approx(values.std(ddof=1) / np.sqrt(len(values)), abs=6e-4, rel=1e-2)
        assert below == pytest.approx(100 * (values < 0).mean(), abs=0.6)
        assert largest == pytest.approx(values.max(), abs=0.06, rel=1e-2)


def test_own_samples_are_the_moved_policys(explorer):
    """On the policy's own samples k1 is KL(policy ‖ reference) in the mean; on the reference's it is negative."""
    last = len(STEPS) - 1
    assert explorer.means(last)["k1"] > 0
    explorer.source.value = STALE
    assert explorer.means(last)["k1"] < 0


def test_slider_moves_story_and_alternative_text(explorer):
    explorer.step.value = 10
    assert "Weights 2 of the way" in explorer.html.value and "at distance 2: exact" in explorer.html.value
    explorer.step.value = 0
    assert "Weights 0 of the way" in explorer.html.value and "<b>0.000</b>" in explorer.html.value
    assert "−0.0" not in explorer.html.value and "-0.0" not in explorer.html.value


def test_other_completions_walk_through_the_fixed_set_and_come_back(explorer):
    explorer.size.value = 8
    seen = []
    for _ in range(4):
        seen.append(explorer.means(5)["k1"])
        explorer.others.click()
    assert len(set(seen)) == 4
    assert explorer.first == 0 and explorer.means(5)["k1"] == seen[0]


def test_all_completions_are_the_start_again(explorer):
    whole = explorer.means(5)
    explorer.size.value = 8
    explorer.others.click()
    explorer.size.value = explorer.rows
    assert explorer.first == 0 and explorer.means(5) == whole


def test_static_twin_is_a_table_of_all_distances(explorer):
    rows = re.findall("<tr>(.*?)</tr>", explorer.static())
    assert len(rows) == 1 + len(STEPS)
    last = re.findall("<td><span>(.*?)</span></td>", rows[-1])
    means = explorer.means(len(STEPS) - 1)
    assert [number(cell) for cell in last] == pytest.approx(
        [2, explorer.accuracy[-1], *(means[name] for name in ("exact", "k1", "k2", "k3"))], abs=6e-3
    )
