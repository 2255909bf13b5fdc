"""ScoreboardExplorer on made-up curves, token_effects against pushes and steps worked out by other means; and the pictures."""

import html
import math
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from grpo_core import Addition, warm_start
from grpo_core.lab.group_stepper import RECORDED_GROUP, Group
from grpo_core.lab.scoreboard_explorer import AXES, ScoreboardExplorer
from grpo_core.lab.scoreboard_figures import plot_against_reward_model, plot_calibration, plot_constants, plot_dpo
from grpo_core.lab.token_effects import LEARNING_RATE, OWN_GROUP, UPDATES, judges, token_effects
from grpo_core.studies.scoreboard import METHODS

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = (1, 5), (0, 2, 3, 4, 6, 7)  # In the worked group.
ENDS = {"GRPO": (0.70, 0.72, 0.77), "DPO": (0.60, 0.61, 0.68), "RLOO": (0.71, 0.70, 0.78), "supervised": (0.9, 0.9, 0.9)}


def made_up(ends=ENDS):
    """Three seeds that climb from 0.35 to their ends in two rounds."""
    rows = []
    for steps in (40, 160):
        for name, accuracies in ends.items():
            for seed, end in enumerate(accuracies):
                for i, accuracy in enumerate((0.35, 0.5, end)):
                    sampled, told = (0, 5 * i) if name == "supervised" else (10 * i, 0)
                    seen = {"completions": sampled, "answers": told}
                    spent = {"gradient_steps": steps * i, "tokens": 100 * i + seed}
                    rows.append({"method": name, "steps": steps, "seed": seed, "accuracy": accuracy, **seen, **spent})
    return pd.DataFrame(rows)


@pytest.fixture
def explorer():
    made = ScoreboardExplorer(made_up())
    yield made
    made.close()


def shown(explorer):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", explorer.html.value)))


def pushes(method, group=RECORDED_GROUP):
    """(completions and the true answer, tokens)."""
    return torch.tensor(token_effects(method, group).pivot(index="completion", columns="t", values="push").to_numpy())


CONSTANT = {  # The same on all three tokens: of a right completion, and of a wrong one.
    "GRPO": (0.75 / (math.sqrt(3) / 4 + 1e-4), -0.25 / (math.sqrt(3) / 4 + 1e-4)),
    "RLOO": (1 - 1 / 7, -2 / 7),
    "REINFORCE, batch mean": (0.75, -0.25),
    "REINFORCE, no baseline": (1.0, 0.0),
}


@pytest.mark.parametrize("method", CONSTANT)
def test_push_is_the_advantage(method):
    right, wrong = CONSTANT[method]
    expected = torch.tensor([right if i in RIGHT else wrong for i in range(8)] + [0.0], dtype=torch.float64)
    assert torch.allclose(pushes(method), expected.unsqueeze(1).expand(9, 3), atol=1e-4)


def test_expert_iteration_imitates_each_right_text_once():
    expected = torch.zeros(9, 3, dtype=torch.float64)
    expected[RIGHT[0]] = 1.0
    assert torch.allclose(pushes("expert iteration"), expected)


def test_dpo_pushes_as_many_wrong_completions_as_there_are_right_ones():
    """At the start each pair is pushed by beta · sigmoid(0) = 3 / 2."""
    expected = torch.zeros(9, 3, dtype=torch.float64)
    expected[[1, 5]], expected[[0, 2]] = 1.5, -1.5
    assert torch.allclose(pushes("DPO"), expected, atol=1e-6)


def test_supervised_sees_the_true_answer_alone():
    expected = torch.zeros(9, 3, dtype=torch.float64)
    expected[8] = 1
    assert torch.allclose(pushes("supervised"), expected, atol=1e-6)


def values_of(critic, texts, prompt="24+48="):
    """What the critic says before each token, one completion at a time, without cache and batch."""
    task = Addition()
    return [
        [critic.network(torch.tensor([task.encode(prompt + text[:t])]))[0, -1, 0].item() for t in range(len(text))]
        for text in texts
    ]


@pytest.mark.parametrize("method, learned", [("PPO, verifier", False), ("PPO, reward model", True)])
def test_ppo_pushes_by_whitened_gae(method, learned):
    critic, reward_model = judges(learned)
    texts, task = OWN_GROUP.texts, Addition()
    if learned:
        rows = [torch.tensor([task.encode(OWN_GROUP.prompt + text)]) for text in texts]
        scores = [reward_model.network(row)[0, -1, 0].item() for row in rows]
    else:
        scores = OWN_GROUP.rewards
    advantages = []
    for values, score in zip(values_of(critic, texts), scores):
        paid, after = [0, 0, score], [*values[1:], 0]
        deltas = [r + n - v for r, n, v in zip(paid, after, values)]
        advantages.append([sum(0.95 ** (k - t) * deltas[k] for k in range(t, 3)) for t in range(3)])
    flat = torch.tensor(advantages, dtype=torch.float64)
    expected = (flat - flat.mean()) / flat.std(correction=0)
    found = pushes(method, OWN_GROUP)
    assert torch.allclose(found[:8], expected, atol=2e-3) and found[8].abs().max() == 0


def test_reward_models_scores_and_verdicts_push_differently():
    assert not torch.allclose(pushes("PPO, verifier"), pushes("PPO, reward model"), atol=0.1)


def log_probs_at(policy, prompt, text, temperature):
    """By the plain definition: (T,)."""
    task = Addition()
    ids = torch.tensor([task.encode(prompt + text)])
    logits = policy(ids)[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(text)), ids[0, len(prompt) :]]


def test_change_is_that_of_one_step_of_adamw():
    """Supervised: cross-entropy on "72;", written out with torch alone."""
    policy, task = warm_start(), Addition()
    texts = ("74;", "72;", "73;")
    with torch.no_grad():
        before = {text: log_probs_at(policy, "24+48=", text, 0.7) for text in texts}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0)
    logits = policy(torch.tensor([task.encode("24+48=72")]))[0, 5:]
    F.cross_entropy(logits, torch.tensor(task.encode("72;"))).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    effects = token_effects("supervised")
    for text in texts:
        with torch.no_grad():
            change = log_probs_at(policy, "24+48=", text, 0.7) - before[text]
        rows = effects[effects["text"] == text].iloc[:3]
        assert rows["before"].tolist() == pytest.approx(before[text].tolist(), abs=1e-4)
        assert rows["change"].tolist() == pytest.approx(change.tolist(), abs=5e-3)


@pytest.mark.parametrize("method", UPDATES)
@pytest.mark.parametrize("group", [RECORDED_GROUP, OWN_GROUP], ids=["recorded", "own"])
def test_net_adds_up_what_meets_in_the_same_token(method, group):
    frame = token_effects(method, group)
    for row in frame.itertuples():
        alike = [other.push for other in frame.itertuples() if other.text[: other.t + 1] == row.text[: row.t + 1]]
        assert row.net == pytest.approx(sum(alike), abs=1e-6)
    assert frame["text"].drop_duplicates().tolist() == list(dict.fromkeys([*group.texts, "72;"]))


def chance(method, group):
    """Of the right answer, before and after."""
    rows = token_effects(method, group).query("completion == 8")
    return math.exp(rows["before"].sum()), math.exp((rows["before"] + rows["change"]).sum())


@pytest.mark.parametrize("method", [name for name in UPDATES if name != "PPO, reward model"])
def test_its_own_group_teaches_the_right_answer_whatever_the_method(method):
    before, after = chance(method, OWN_GROUP)
    assert after > before + 0.1


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "PPO, verifier", "DPO"])
def test_pushing_down_what_is_rare_already_harms_what_is_right(method):
    """The worked group is another policy's."""
    before, after = chance(method, RECORDED_GROUP)
    assert after < before - 0.05


def test_own_group_is_what_a_run_with_seed_0_begins_with():
    table = (ROOT / "outputs/group_example.txt").read_text(encoding="utf-8")
    texts = re.search(r"\| completion \| (.*) \|", table)[1].split(" | ")
    rewards = re.search(r"\| reward \| (.*) \|", table)[1].split(" | ")
    assert Group("24+48=", "72", tuple(texts), tuple(map(float, rewards))) == OWN_GROUP


def test_each_method_of_the_scoreboard_has_its_update():
    assert list(UPDATES) == list(METHODS)


def test_difference_is_paired_over_seeds(explorer):
    """DPO minus GRPO: −.10, −.11, −.09; Student's t for three seeds is 4.3027."""
    explorer.one.value, explorer.other.value = "DPO", "GRPO"
    half = 4.3027 * 0.01 / math.sqrt(3)
    gap = explorer.difference
    assert (gap.value, gap.low, gap.high) == pytest.approx((-0.1, -0.1 - half, -0.1 + half), abs=1e-4)
    assert "Difference −0.100 [−0.125, −0.075]: GRPO is better , by more than the luck of 3 seeds." in shown(explorer)


def test_an_interval_that_holds_0_is_called_no_difference(explorer):
    explorer.one.value, explorer.other.value = "GRPO", "RLOO"
    assert "no difference that 3 seeds could show" in shown(explorer)
    assert "is better" not in shown(explorer)


def test_the_same_method_twice_is_no_comparison(explorer):
    explorer.one.value = explorer.other.value = "GRPO"
    assert "Pick two different methods" in shown(explorer) and "nan" not in shown(explorer)


def test_curve_is_mean_and_interval_of_the_seeds(explorer):
    curve = explorer.curve("GRPO")
    ends = torch.tensor(ENDS["GRPO"], dtype=torch.float64)
    half = 4.3027 * ends.std().item() / math.sqrt(3)
    assert curve["x"].tolist() == [0, 10, 20]
    assert curve["value"].tolist() == pytest.approx([0.35, 0.5, ends.mean().item()])
    assert curve["low"].tolist()[2] == pytest.approx(ends.mean().item() - half, abs=1e-4)
    assert (curve["low"] >= 0).all() and (curve["high"] <= 1).all()


@pytest.mark.parametrize("axis, expected", [("texts seen", [0, 5, 10]), ("gradient steps", [0, 160, 320])])
def test_x_axis_is_what_was_spent(explorer, axis, expected):
    """Supervised training samples nothing: what it sees are answers."""
    explorer.steps.value, explorer.axis.value = 160, axis
    assert explorer.curve("supervised")["x"].tolist() == expected
    assert f"Greedy accuracy against {axis}" in explorer.html.value


def test_x_axis_averages_over_seeds(explorer):
    explorer.axis.value = "tokens trained on"
    assert explorer.curve("GRPO")["x"].tolist() == [1, 101, 201]


def test_shows_pushes_and_what_a_step_makes_of_them(explorer):
    explorer.one.value, explorer.other.value, explorer.group.value = "GRPO", "supervised", "worked group"
    words = shown(explorer)
    assert "72; 1 7 ▲ +1.73 2 ▲ +1.73 ; ▲ +1.73" in words and "73; 0 7 ▼ −0.58 3 ▼ −0.58 ; ▼ −0.58" in words
    assert "72; true answer 7 ● 0.00 2 ● 0.00 ; ● 0.00" in words and "72; true answer 7 ▲ +1.00" in words
    before, after = chance("GRPO", RECORDED_GROUP)
    assert f"{before:.3f} → {after:.3f}" in words
    assert words.count("7 0.00 → ") == 3, "what all completions share is not pushed by GRPO"


@pytest.mark.parametrize("method", ENDS)
def test_every_choice_can_be_shown(explorer, method):
    explorer.one.value = method
    for axis in AXES:
        explorer.axis.value = axis
    explorer.steps.value, explorer.group.value = 160, "worked group"
    words = shown(explorer)
    assert f"{method} ends at" in words and "Not possible" not in words and "nan" not in words and "-0.0" not in words


def test_static_twin_tells_the_story_without_a_kernel(explorer):
    assert "ends at" in explorer.static() and explorer.static().count("<table") == 4
    assert re.search(r'<img alt="Greedy accuracy against', explorer.static())


def test_what_cannot_be_shown_is_said_at_once():
    with pytest.raises(ValueError, match="lacks the columns \\['tokens'\\]"):
        ScoreboardExplorer(made_up().drop(columns="tokens"))
    with pytest.raises(ValueError, match="two methods and two seeds"):
        ScoreboardExplorer(made_up({"GRPO": ENDS["GRPO"]}))
    with pytest.raises(ValueError, match="two methods and two seeds"):
        ScoreboardExplorer(made_up().query("seed == 0"))


@pytest.fixture
def canvas():
    """pyplot without a window; yields a function that gives the lines of each panel drawn last, by label."""
    backend = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield lambda: [{line.get_label(): list(line.get_ydata()) for line in axes.lines} for axes in plt.gcf().axes]
    plt.close("all")
    plt.switch_backend(backend)


def test_constants_are_drawn_beside_what_a_coin_would_have(canvas):
    plot_constants([0.2, 0.6], [0.3, 0.1])
    (lines,) = canvas()
    assert lines["quietest constant, one prompt"] == [0.3, 0.1]
    assert lines["1 − p, as for the coin"] == [1, 0] and lines["the exact value, p"] == [0, 1]


def test_calibration_has_a_dot_with_its_interval_for_each_bin(canvas):
    bins = {"predicted": [0.55, 0.95], "observed": [0.5, 0.8], "observed_low": [0.4, 0.7], "observed_high": [0.6, 0.9]}
    plot_calibration(pd.DataFrame(bins | {"pairs": [100, 20]}))
    (axes,) = plt.gcf().axes
    container = axes.containers[0]
    assert container.lines[0].get_ydata().tolist() == [0.5, 0.8]
    ends = [segment[:, 1].round(6).tolist() for segment in container.lines[2][0].get_segments()]
    assert ends == [[0.4, 0.6], [0.7, 0.9]]
    assert [text.get_text().strip() for text in axes.texts] == ["100", "20"]


def test_dpo_has_a_panel_for_each_beta_and_one_for_the_accuracies(canvas):
    frame = pd.DataFrame({"gradient_steps": [1, 2], "chosen": [0, -1.0], "rejected": [0, -3.0], "accuracy": [0.4, 0.2]})
    plot_dpo({0.1: frame, 3.0: frame.assign(chosen=[0, 0.5], accuracy=[0.4, 0.6])})
    small, large, accuracy = canvas()
    assert small["chosen"] == [0, -1] and small["rejected"] == [0, -3] and large["chosen"] == [0, 0.5]
    assert accuracy == {"beta 0.1": [0.4, 0.2], "beta 3": [0.4, 0.6]}


def test_what_the_judge_paid_stands_beside_what_it_was_worth(canvas):
    judged = pd.DataFrame({"score": [0.1, 0.9], "reward": [0.3, 0.2], "accuracy": [0.4, 0.3]})
    plot_against_reward_model(judged, judged.assign(accuracy=[0.4, 0.7]))
    paid, worth = canvas()
    assert paid == {"the judge's score": [0.1, 0.9], "the verifier's reward, unseen": [0.3, 0.2]}
    assert worth == {"paid by the judge": [0.4, 0.3], "paid by the verifier": [0.4, 0.7]}
