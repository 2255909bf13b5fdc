"""What each method needs: parameters, bytes and FLOPs against hand counts, and the formula for large models by hand."""

import gc
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from grpo_core import TinyGPT, rollout, sample_groups, warm_start
from grpo_core.rivals import ppo
from grpo_core.rivals.at_scale import RECIPES, at_scale, totals, without_critic
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.meter import PARTS, Meter, no_evaluation
from grpo_core.studies import shopping_list
from grpo_core.studies.shopping_list import METHODS, measure

POLICY, ONE_NUMBER = 102_797, 102_797 - (64 * 13 + 13) + (64 + 1)  # The critic has another head.
SMALL = Budget(prompts_per_iteration=6, group_size=4, iterations=1, gradient_steps=2)
HOLDS = {
    "GRPO": {"policy", "reference"},
    "PPO, verifier": {"policy", "reference", "critic"},
    "PPO, reward model": {"policy", "reference", "critic", "reward model"},
    "DPO": {"policy"},
    "REINFORCE": {"policy"},
    "RLOO": {"policy"},
    "expert iteration": {"policy"},
    "supervised": {"policy"},
}


def linear(width, layers, vocab):
    """Multiplications and additions for one token in all matrix products with weights."""
    return layers * 2 * 12 * width**2 + 2 * width * vocab


def attention(width, layers, queries, keys):
    """Those of queries with keys and of weights with values."""
    return layers * 4 * queries * keys * width


def forward_flops(rows, length, width=8, layers=2, vocab=3):
    return rows * (length * linear(width, layers, vocab) + attention(width, layers, length, length))


def training_flops(rows, length, width=8, layers=2, vocab=3):
    """Forward; twice as much on the way back; and attention computes its scores once more."""
    once_more = rows * attention(width, layers, length, length) // 2
    return 3 * forward_flops(rows, length, width, layers, vocab) + once_more


@pytest.fixture(scope="module")
def bills(task):
    """A bill for each method, on a small budget."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shopping_list, "BUDGET", SMALL)
        return {method: measure(task, method).frame.set_index("network") for method in METHODS}


@pytest.fixture
def ids():
    return torch.randint(3, (5, 7), generator=torch.Generator().manual_seed(0))


def test_a_policy_without_blocks_costs_one_linear_layer(ids):
    policy = TinyGPT(3, width=8, layers=0, heads=2)
    with Meter(policy) as meter:
        policy(ids).sum().backward()
    assert meter.uses["policy"].flops == {"updating": 3 * 2 * 5 * 7 * 8 * 3}


@pytest.mark.parametrize(("rows", "length", "width", "layers", "vocab"), [(5, 7, 8, 2, 3), (1, 3, 16, 1, 2), (4, 2, 8, 3, 5)])
def test_flops_of_a_transformer_are_those_of_the_closed_form(rows, length, width, layers, vocab):
    policy = TinyGPT(vocab, width, layers, heads=2)
    ids = torch.zeros(rows, length, dtype=torch.long)
    with Meter(policy) as meter:
        with torch.no_grad():
            policy(ids)
        policy(ids).sum().backward()
    use = meter.uses["policy"]
    assert use.flops["scoring"] == forward_flops(rows, length, width, layers, vocab)
    assert use.flops["updating"] == training_flops(rows, length, width, layers, vocab)
    assert use.calls == {"scoring": 1, "updating": 1, "backward": 1}
    assert use.tokens == {"scoring": rows * length, "updating": rows * length, "backward": rows * length}


@pytest.mark.parametrize("first", ["policy", "critic"])
def test_networks_in_one_loss_are_told_apart(ids, first):
    policy, critic = TinyGPT(3, 8, 2, 2), TinyGPT(1, 16, 1, 2)
    critic.token_embedding = torch.nn.Embedding(3, 16)
    with Meter(policy) as meter:
        networks = [policy, critic] if first == "policy" else [critic, policy]
        sum(network(ids).square().mean() for network in networks).backward()
    assert meter.uses["policy"].flops == {"updating": training_flops(5, 7)}
    assert meter.uses["critic"].flops == {"updating": training_flops(5, 7, 16, 1, 1)}


def test_a_pass_whose_gradient_never_comes_back_costs_its_forward(ids):
    policy = TinyGPT(3, 8, 2, 2)
    with Meter(policy) as meter:
        policy(ids)
    assert meter.uses["policy"].flops == {"updating": forward_flops(5, 7)}
    assert meter.uses["policy"].calls["backward"] == 0


def test_plain_sampling_reads_each_prompt_once_and_then_token_by_token(tiny, letters):
    policy, problems = tiny(), letters.problems[:1] * 3  # Equal prompts: nothing must be saved.
    with Meter(policy, shared=False) as meter:
        sample_groups(policy, letters, problems, group_size=4)
    rows, prompt, completion = 12, 2, letters.max_new_tokens
    one_by_one = sum(linear(8, 2, 3) + attention(8, 2, 1, prompt + t) for t in range(1, completion))
    use = meter.uses["policy"]
    assert use.flops["sampling"] == forward_flops(rows, prompt) + rows * one_by_one
    assert use.tokens["sampling"] == rows * (prompt + completion - 1)
    assert use.flops["scoring"] == forward_flops(rows, prompt + completion)
    assert meter.completions == rows


def test_rule_of_thumb(ids):
    policy = TinyGPT(3, 8, 2, 2)
    parameters = sum(p.numel() for p in policy.parameters())
    with Meter(policy) as meter:
        with torch.no_grad():
            policy(ids)
        policy(ids).sum().backward()
        policy(ids)
    assert meter.uses["policy"].plain_flops("scoring") == 2 * parameters * 35
    assert meter.uses["policy"].plain_flops("updating") == (2 * 70 + 4 * 35) * parameters


def test_each_storage_that_autograd_keeps_counts_once():
    policy, x = TinyGPT(3, 8, 2, 2), torch.randn(10, 10, requires_grad=True)
    with Meter(policy) as meter:
        y = x.detach() * 2  # 400 bytes.
        (x * y + x * y[:, :1] + x * y).sum().backward()
        assert meter.activations == 400
        (x * y).sum().backward()  # The first is gone: the peak stays.
        assert meter.activations == 400
        kept = [(x * torch.ones(10, 10)) for _ in range(3)]
        assert meter.activations == 1200
        del kept
        (x - x.amax(dim=1, keepdim=True).detach()).sum().backward()  # Nobody goes back through what amax kept of itself.
        [(x * torch.ones(10, 10)) for _ in range(3)]
        assert meter.activations == 1200


def test_weights_are_no_activations():
    policy = TinyGPT(3, width=8, layers=0, heads=2)
    with Meter(policy) as meter:
        loss = policy.head(torch.ones(4, 8, requires_grad=True)).sum()
    assert loss.requires_grad and meter.activations == 4 * 8 * 4  # The input, not the weight.


def test_activations_of_networks_trained_in_turn_do_not_add_up(ids):
    policy, critic = TinyGPT(3, 8, 2, 2), TinyGPT(1, 8, 2, 2)
    critic.token_embedding = torch.nn.Embedding(3, 8)
    with Meter(policy) as in_turn:
        for network in (policy, critic):
            network(ids).sum().backward()
    with Meter(policy) as together:
        (policy(ids).sum() + critic(ids).sum()).backward()
    parts = [use.activations for use in in_turn.uses.values()]
    assert in_turn.activations == max(parts) < together.activations <= sum(parts)


def test_gradients_and_optimizer_state_are_counted_where_they_are():
    policy, critic = TinyGPT(3, 8, 2, 2), TinyGPT(1, 8, 2, 2)
    sizes = [sum(p.numel() for p in network.parameters()) for network in (policy, critic)]
    tensors = len(list(policy.parameters()))
    ids = torch.zeros(2, 2, dtype=torch.long)
    with Meter(policy) as meter:
        for network, kind in ((critic, torch.optim.AdamW), (policy, torch.optim.SGD)):
            optimizer = kind(network.parameters(), lr=0.1)
            network(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer = None
            gc.collect()
    uses = meter.uses
    assert [uses[name].parameters for name in ("policy", "critic")] == sizes
    assert [uses[name].gradients for name in ("policy", "critic")] == [4 * size for size in sizes]
    assert uses["critic"].optimizer == 2 * 4 * sizes[1] + 4 * tensors and uses["policy"].optimizer == 0
    assert meter.state == 4 * sum(sizes) + max(3 * 4 * sizes[1] + 4 * tensors, 4 * sizes[0])


def test_a_gradient_in_half_precision_takes_half():
    policy = TinyGPT(3, 8, 2, 2).bfloat16()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with Meter(policy) as meter:
        policy(torch.zeros(2, 2, dtype=torch.long)).sum().backward()
        optimizer.step()
    use = meter.uses["policy"]
    assert use.weights == use.gradients == 2 * use.parameters


def test_networks_of_each_method(bills):
    assert {method: set(frame.index) - {"total"} for method, frame in bills.items()} == HOLDS


def test_bytes_of_each_network(bills):
    for method, frame in bills.items():
        for name, row in frame.drop("total").iterrows():
            size = POLICY if name in ("policy", "reference") else ONE_NUMBER
            trained = name != "reference"
            assert row["parameters"] == size and row["weights"] == 4 * size, (method, name)
            assert row["gradients"] == 4 * size * trained, (method, name)
            assert row["optimizer"] == (2 * 4 * size + 4 * 30) * trained, (method, name)  # 30 tensors, a step count each.
    state = {method: frame.loc["total", "state"] for method, frame in bills.items()}
    assert state["GRPO"] == 16 * POLICY + 120 + 4 * POLICY
    assert state["PPO, verifier"] == state["GRPO"] + 16 * ONE_NUMBER + 120
    assert state["REINFORCE"] == state["DPO"] == state["supervised"] == 16 * POLICY + 120
    assert state["PPO, verifier"] < state["PPO, reward model"] < 3 * (16 * POLICY + 120) + 4 * POLICY  # One Adam is gone.


def test_calls_of_each_method_are_those_of_its_recipe(bills):
    """Old log-probs are read for every method; `train` reads one row more after each update, to see if the policy lives."""
    passes = {
        method: {name: tuple(row[f"{part}_calls"] for part in PARTS) for name, row in bills[method].iterrows()}
        for method in bills
    }
    assert passes["GRPO"] == {"policy": (4, 2, 2), "reference": (0, 1, 0), "total": (4, 3, 2)}
    assert passes["PPO, verifier"] == {"policy": (4, 1, 2), "reference": (0, 1, 0), "critic": (0, 1, 2), "total": (4, 3, 4)}
    for name in ("REINFORCE", "RLOO", "expert iteration"):
        assert passes[name]["policy"] == (4, 1, 2)
    assert passes["DPO"]["policy"] == (4, 2, 2)  # It was the reference before its first step.
    assert passes["supervised"]["policy"] == (0, 0, 2)
    for frame in bills.values():
        assert (frame["backward_calls"] == frame["updating_calls"]).all()


def test_plain_flops_of_large_parts_agree_with_the_recipes(bills):
    """The measured counts and the formula for large models are two derivations of one number."""
    large = totals(at_scale(mu=2))
    sums = {method: bills[method].loc["total"] for method in ("GRPO", "PPO, verifier")}
    measured = [sum(row[f"{part}_plain"] for part in PARTS) for row in sums.values()]
    computed = [large.loc[method, "flops"] for method in sums]
    assert measured[0] / measured[1] == pytest.approx(computed[0] / computed[1], rel=0.01)
    updating = sums["GRPO"]["updating_plain"]
    assert updating == 2 * 6 * POLICY * 6 * 4 * 10  # Two steps on 24 completions of 6 + 4 tokens.


def test_what_is_read_once_costs_less_and_never_more(bills):
    for method, frame in bills.items():
        assert frame.loc["total", "sampling_flops"] <= frame.loc["total", "sampling_plain"], method
    row = bills["GRPO"].loc["total"]
    assert row["updating_flops"] < 0.8 * row["updating_plain"]


def test_samples_and_answers(bills):
    for method, frame in bills.items():
        row = frame.loc["total"]
        assert (row["completions"], row["answers"]) == ((0, 24) if method == "supervised" else (24, 0)), method


def test_activations_here_are_not_halved(bills):
    both = [bills[method].loc["total", "activations"] for method in ("GRPO", "PPO, verifier")]
    assert 0.75 < both[0] / both[1] < 1.33
    critic = bills["PPO, verifier"]
    assert critic.loc["total", "activations"] < 0.75 * (
        critic.loc["policy", "activations"] + critic.loc["critic", "activations"]
    )


@pytest.mark.parametrize("method", ["GRPO", "PPO, verifier", "DPO"])
def test_watching_changes_nothing(task, method):
    trained = []
    for watched in (False, True):
        policy = warm_start()
        with no_evaluation():
            if watched:
                with Meter(policy):
                    METHODS[method](task, policy, SMALL)
            else:
                METHODS[method](task, policy, SMALL)
        trained.append(policy.state_dict())
    assert_close(trained[0], trained[1], rtol=0, atol=0)
    assert not torch.equal(trained[0]["head.weight"], warm_start().head.weight)


def test_everything_is_put_back(ids):
    before = rollout.generate, rollout.shared_logits, ppo.shared_logits
    policy = TinyGPT(3, 8, 2, 2)
    with pytest.raises(KeyError), Meter(policy, shared=False) as meter:
        assert before[1] is not rollout.shared_logits is ppo.shared_logits
        raise KeyError
    policy(ids).sum().backward()
    assert meter.uses["policy"].flops == {} and meter.activations == 0
    assert before == (rollout.generate, rollout.shared_logits, ppo.shared_logits)


GB = {  # By hand: 14 GB of weights; 112 GB if trained.
    "GRPO": 126, "GRPO, beta 0": 112, "PPO, verifier": 238, "PPO, verifier, beta 0": 224, "PPO, value head": 126,
    "PPO, reward model": 252, "DPO": 112, "REINFORCE or RLOO": 112, "expert iteration": 112, "supervised": 112,
}  # fmt: skip
PASSES = {  # In forward passes, mu 2: sampling + scoring + 2 · 3 for each trained network.
    "GRPO": 1 + 2 + 6, "GRPO, beta 0": 1 + 1 + 6, "PPO, verifier": 1 + 3 + 12, "PPO, verifier, beta 0": 1 + 2 + 12,
    "PPO, value head": 1 + 2 + 6, "PPO, reward model": 1 + 4 + 12, "DPO": 1 + 1 + 6, "REINFORCE or RLOO": 1 + 6,
    "expert iteration": 1 + 3, "supervised": 6,
}  # fmt: skip


def test_scale_by_hand():
    total = totals(at_scale())
    assert list(total.index) == list(RECIPES) == list(GB)
    assert (total["state"] / 1e9).tolist() == pytest.approx(list(GB.values()), rel=1e-6)
    assert (total["flops"] / (2 * 7e9 * 384 * 1000)).tolist() == pytest.approx(list(PASSES.values()), rel=1e-5)
    assert total["flops_ratio"].tolist() == pytest.approx([n / 9 for n in PASSES.values()], rel=1e-5)
    kinds = at_scale().query("method == 'PPO, verifier'").set_index("network")[["weights", "gradients", "optimizer"]] / 1e9
    assert kinds.loc["critic"].tolist() == kinds.loc["policy"].tolist() == [14, 14, 84]
    assert kinds.loc["reference"].tolist() == [14, 0, 0]


def test_value_head_by_hand():
    extra = totals(at_scale()).loc[["PPO, value head", "GRPO"], ["state", "parameters"]].diff().iloc[1].abs()
    assert extra["state"] == 16 * 4097 and extra["parameters"] == 4097


@pytest.mark.parametrize("factor", [0.1, 10])
def test_everything_grows_with_its_cause(factor):
    one, bigger = totals(at_scale(width=1)), totals(at_scale(parameters=7e9 * factor, width=1))
    assert_close(torch.tensor((bigger["state"] / one["state"]).to_numpy()), torch.full((10,), factor, dtype=torch.float64))
    longer = totals(at_scale(tokens=int(1000 * factor), width=1))
    assert_close(torch.tensor((longer["flops"] / one["flops"]).to_numpy()), torch.full((10,), factor, dtype=torch.float64))
    assert longer["state"].tolist() == one["state"].tolist()


def test_dropping_the_critic_approaches_half_and_never_reaches_it():
    shares = [without_critic(mu) for mu in (1, 2, 4, 16, 1000)]
    assert shares[:3] == pytest.approx([6 / 10, 9 / 16, 15 / 28])
    assert shares == sorted(shares, reverse=True) and 0.5 < shares[-1] < 0.501
    assert [without_critic(2, s) for s in (0.0, 0.7, 1.0)] == pytest.approx([8 / 15, 0.7 + 0.3 * 8 / 15, 1.0])


@pytest.mark.parametrize("setting", [{"parameters": 0}, {"mu": 0}, {"completions": -1}, {"tokens": 0}, {"width": 0}])
def test_sizes_must_be_positive(setting):
    with pytest.raises(ValueError, match="above 0"):
        at_scale(**setting)


def test_unknown_method(task):
    with pytest.raises(ValueError, match="GRPO, PPO"):
        measure(task, "Q-learning")


def test_files(tmp_path, monkeypatch, bills):
    monkeypatch.setattr(shopping_list, "BUDGET", SMALL)
    monkeypatch.setattr(shopping_list, "measure", lambda task, method: SimpleNamespace(frame=bills[method].reset_index()))
    shopping_list.write(tmp_path, seeds=[0])
    assert {file.name for file in tmp_path.iterdir()} == {
        "shopping_list.csv",
        "at_scale.csv",
        "shopping_list.md",
        "shopping_list.png",
        "settings.json",
    }
    here = totals(pd.read_csv(tmp_path / "shopping_list.csv"))
    assert list(here.index) == list(METHODS) and here.loc["GRPO", "seconds_ratio"] == 1
    assert here["sampling_time"].between(0, 1).all() and here.loc["supervised", "sampling_time"] == 0
    text = (tmp_path / "shopping_list.md").read_text()
    for number in (
        "112 GB",
        "238 GB",
        "126 GB: 47 % less",
        "14 GB",
        "224 GB against 112 GB",
        "4,097",
        "60 %, 56 %",
        "54 %",
        "86 %",
    ):
        assert number in text, number
    assert "nan" not in text
    assert text.count("\n| ") == 2 * 2 + len(METHODS) + len(RECIPES)
