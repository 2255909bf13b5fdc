"""Models of Hugging Face as policies: each number is held against the plain definition or transformers' own generate."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason='needs pip install -e ".[real]"')

from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from grpo_core import CheckpointError, GRPOConfig, Problem, greedy_accuracy, grpo_update, sample_groups, token_log_probs, train
from grpo_core.bridge.causal_lm import CausalLM, add_lora, eos_ids, load
from grpo_core.evaluate import greedy_completions

VOCABULARY, END, STOP = 11, 2, 3


def llama(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=24, attention_dropout=dropout, initializer_range=0.4,
            bos_token_id=None, eos_token_id=END,
        )
    )  # fmt: skip


def gpt2(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=24, n_embd=16, n_layer=2, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, initializer_range=0.4, bos_token_id=None, eos_token_id=END,
        )
    )  # fmt: skip


BUILDERS = [llama, gpt2]


class Digits:
    """A task on bare tokens: a digit is its own id, and a completion is right if its second token is 7 and it has ended."""

    eos_id, max_new_tokens = (END, STOP), 5

    def __init__(self):
        self.train = self.validation = self.held_out = [Problem(p, "7") for p in ("456", "4", "98765", "55", "67", "7894")]

    def encode(self, text):
        return [int(character) for character in text]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def verify(self, completion, answer):
        ids = completion.split()
        return float(ids[0] == answer or (len(ids) > 1 and ids[1] == answer))


def one_row_at_a_time(model, prompts, completions, temperature):
    """Log-probs by the plain definition: no batch, no padding, no cache, no mask."""
    rows = []
    for prompt, completion in zip(prompts, completions):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        rows.append(logits.log_softmax(-1)[range(len(completion)), completion])
    return torch.stack(rows)


def padded(prompts, fill=END):
    longest = max(map(len, prompts))
    ids = torch.tensor([[fill] * (longest - len(row)) + row for row in prompts])
    return ids, torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in prompts])


PROMPTS, COMPLETIONS = [[4, 5, 6], [7], [8, 9, 10, 4, 5]], [[6, 7, 2], [2, 9, 9], [3, 4, 5]]


@pytest.mark.parametrize("fill", [END, 9])
@pytest.mark.parametrize("build", BUILDERS)
def test_left_padding_scores_as_one_row_at_a_time(build, gradient, fill):
    model = build().double()
    expected = one_row_at_a_time(model.eval(), PROMPTS, COMPLETIONS, 0.7)
    ids, mask = padded(PROMPTS, fill)
    policy = CausalLM(model)
    scores = token_log_probs(policy, ids, torch.tensor(COMPLETIONS), 0.7, mask)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, 9).view(3, 3)  # Some sum of log-probs, of both signs.
    pair = [gradient((x * weights).sum(), model) for x in (scores, expected)]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-11)
    assert pair[0].abs().max() > 0.01


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("rows_at_once", [64, 2])
def test_greedy_completions_are_those_of_transformers(build, rows_at_once):
    """Its generate is another implementation of the same: left padding, several EOS, a cache."""
    model, task = build().eval(), Digits()
    prompts = [task.encode(problem.prompt) for problem in task.train]
    ids, mask = padded(prompts)
    settings = GenerationConfig(do_sample=False, max_new_tokens=5, eos_token_id=[END, STOP], pad_token_id=END)
    theirs = model.generate(ids, attention_mask=mask.long(), generation_config=settings)[:, ids.shape[1] :]
    ours = greedy_completions(CausalLM(model, rows_at_once=rows_at_once), task, task.train)
    width = len(ours[0].split())
    assert ours == [task.decode((row.tolist() + [END] * 5)[:width]) for row in theirs]


@pytest.mark.parametrize("build", BUILDERS)
def test_a_rollout_is_scored_as_it_was_sampled_and_ends_at_any_eos(build):
    policy, task = CausalLM(build(1), rows_at_once=8), Digits()
    generator = torch.Generator().manual_seed(0)
    rollout = sample_groups(policy, task, task.train, 8, 1.5, generator=generator, micro_batch=5)
    assert rollout.rewards.shape == (6, 8) and rollout.prompt_mask is not None
    seen = set()
    for row, mask in zip(rollout.completion_ids.tolist(), rollout.completion_mask.tolist()):
        ends = [place for place, token in enumerate(row) if token in (END, STOP)]
        length = ends[0] + 1 if ends else len(row)
        assert mask == [place < length for place in range(len(row))]
        assert set(row[length:]) <= {END}
        seen.add(row[length - 1])
    assert {END, STOP} < seen, "both EOS and unfinished completions should have been met"
    prompts = [task.encode(problem.prompt) for problem in task.train for _ in range(8)]
    expected = one_row_at_a_time(policy.model, prompts, rollout.completion_ids.tolist(), 1.5)
    torch.testing.assert_close(rollout.old_log_probs, expected, rtol=0, atol=1e-4)


def test_tokens_are_sampled_at_the_temperature():
    policy, task = CausalLM(llama()), Digits()
    rollout = sample_groups(policy, task, task.train[:1], 20_000, 0.5, 1, torch.Generator().manual_seed(0))
    frequencies = rollout.completion_ids.flatten().bincount(minlength=VOCABULARY) / 20_000
    probabilities = (policy.model(torch.tensor([[4, 5, 6]])).logits[0, -1] / 0.5).softmax(-1)
    assert (frequencies - probabilities).abs().max() < 0.015
    flatter = (policy.model(torch.tensor([[4, 5, 6]])).logits[0, -1]).softmax(-1)
    assert (frequencies - flatter).abs().max() > 0.1, "the two temperatures can be told apart"


@pytest.mark.parametrize("micro_batch", [None, 7])
@pytest.mark.parametrize("build", BUILDERS)
def test_first_ratio_is_exactly_1_even_with_dropout_and_micro_batches(build, micro_batch):
    policy, task = CausalLM(build(dropout=0.5).train()), Digits()
    config = GRPOConfig(group_size=4, inner_epochs=1, beta=0, micro_batch=micro_batch, max_new_tokens=5, clip_eps=1e-9)
    rollout = sample_groups(policy, task, task.train, 4, 0.7, generator=torch.Generator(), micro_batch=micro_batch)
    metrics = grpo_update(policy, policy.reference(), torch.optim.SGD(policy.parameters(), 0.1), rollout, config)
    assert metrics["clip_fraction"] == 0 and metrics["kl"] == 0 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("build", BUILDERS)
def test_dropout_is_switched_off_in_any_mode(build):
    with_dropout, without = build(dropout=0.5), build()
    score = (*padded(PROMPTS)[:1], torch.tensor(COMPLETIONS), None)
    expected = CausalLM(without).completion_logits(*score)
    policy = CausalLM(with_dropout.train())
    policy.train()
    with_dropout.train()
    torch.testing.assert_close(policy.completion_logits(*score), expected, rtol=0, atol=0)


def update(policy, rollout, **settings):
    """Weights after two gradient steps of SGD."""
    config = GRPOConfig(max_new_tokens=5, max_grad_norm=1e9, beta=0.1, **settings)
    grpo_update(policy, policy.reference(), torch.optim.SGD(policy.parameters(), 0.3), rollout, config)
    return policy.state_dict()


def closeness(one, other):
    return max((weight - other[name]).abs().max().item() for name, weight in one.items())


@pytest.mark.parametrize("settings", [{}, {"aggregation": "sequence"}, {"aggregation": "constant"}], ids=str)
@pytest.mark.parametrize("build", BUILDERS)
def test_micro_batches_give_the_same_step(build, settings):
    start, task = build(), Digits()
    rollout = sample_groups(CausalLM(start), task, task.train, 4, 1.0, generator=torch.Generator())
    whole = update(CausalLM(copy.deepcopy(start)), rollout, **settings)
    parts = update(CausalLM(copy.deepcopy(start)), rollout, micro_batch=5, **settings)
    assert closeness(whole, parts) < 1e-6
    assert closeness(whole, CausalLM(start).state_dict()) > 1e-3


@pytest.mark.parametrize("build", BUILDERS)
def test_gradient_checkpointing_computes_layers_twice_and_changes_nothing(build, gradient):
    def run(**settings):
        model, calls = build(dropout=0.1), []
        policy = CausalLM(model, **settings)
        layers = model.model.layers if build is llama else model.transformer.h
        block = layers[0].mlp
        block.register_forward_pre_hook(lambda *_: calls.append(1))
        ids, mask = padded(PROMPTS)
        scores = token_log_probs(policy, ids, torch.tensor(COMPLETIONS), 1.0, mask)
        return gradient(scores.sum(), model), len(calls)

    plain, plain_calls = run()
    checkpointed, calls = run(gradient_checkpointing=True)
    assert (plain_calls, calls) == (1, 2)
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=1e-6)


def test_gradient_checkpointing_does_not_disturb_sampling():
    task = Digits()
    texts = [greedy_completions(CausalLM(llama(), gradient_checkpointing=on), task, task.train) for on in (False, True)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("build", BUILDERS)
def test_bfloat16_keeps_weights_and_log_probs_in_float32(build):
    exact, rounded = CausalLM(build()), CausalLM(build(), bf16=True)
    ids, mask = padded(PROMPTS)
    scores = [token_log_probs(policy, ids, torch.tensor(COMPLETIONS), 1.0, mask) for policy in (exact, rounded)]
    assert scores[1].dtype == torch.float32 and {w.dtype for w in rounded.parameters()} == {torch.float32}
    assert 0 < (scores[0] - scores[1]).abs().max() < 0.2
    every = [torch.full_like(torch.tensor(COMPLETIONS), token) for token in range(VOCABULARY)]
    first = [token_log_probs(rounded, ids, tokens, 1.0, mask)[:, 0] for tokens in every]
    torch.testing.assert_close(torch.stack(first).exp().sum(0), torch.ones(3), rtol=0, atol=1e-5)


# LoRA


def test_adapter_starts_at_nothing_and_the_reference_is_the_model_without_it():
    pytest.importorskip("peft")
    plain, policy, task = CausalLM(llama()), CausalLM(add_lora(llama(), 2)), Digits()
    reference = policy.reference()
    assert reference.policy is policy, "no second copy"
    ids, mask = padded(PROMPTS)
    score = (ids, torch.tensor(COMPLETIONS), 1.0, mask)
    expected = token_log_probs(plain, *score)
    torch.testing.assert_close(token_log_probs(policy, *score), expected, rtol=0, atol=1e-6)
    rollout = sample_groups(policy, task, task.train, 8, 1.0, generator=torch.Generator())
    grpo_update(policy, reference, torch.optim.SGD(policy.parameters(), 3.0), rollout, GRPOConfig(max_new_tokens=5))
    with torch.no_grad():
        torch.testing.assert_close(token_log_probs(reference, *score), expected, rtol=0, atol=1e-6)
        assert (token_log_probs(policy, *score) - expected).abs().max() > 1e-3, "the adapter is on again"


def test_lora_trains_and_keeps_only_the_adapter(tmp_path):
    pytest.importorskip("peft")
    policy, frozen = CausalLM(add_lora(gpt2(), 2)), gpt2().state_dict()
    run = {"task": Digits(), "policy": policy, "config": CONFIG}
    train(**run, checkpoint=tmp_path / "run.pt")
    kept = torch.load(tmp_path / "run.pt")["parts"]
    assert all("lora_" in name for name in kept["policy"]) and set(kept["reference"]) == {"fingerprint"}
    left = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): w for name, w in policy.model.state_dict().items()
    }
    assert all(torch.equal(left[name], weight) for name, weight in frozen.items())
    assert all(weight.abs().max() > 0 for weight in policy.state_dict().values())


def test_rank_of_an_adapter_is_checked():
    with pytest.raises(ValueError, match="rank of the adapter"):
        add_lora(llama(), 0)


# Training

CONFIG = GRPOConfig(
    prompts_per_iteration=4, group_size=8, iterations=4, learning_rate=3e-3, max_new_tokens=5, temperature=1.0, beta=0.02
)


def rows(history):
    return history.frame.drop(columns="seconds")


@pytest.mark.parametrize(
    "make",
    [lambda: CausalLM(llama()), lambda: CausalLM(gpt2(), gradient_checkpointing=True), lambda: CausalLM(add_lora(llama(), 2))],
    ids=["llama", "gpt2, checkpointing", "llama, LoRA"],
)
def test_a_resumed_run_is_the_uninterrupted_one(make, tmp_path):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    whole, task = make(), Digits()
    start = copy.deepcopy(whole)
    expected = train(task, whole, CONFIG)
    asked = iter(range(99))
    train(task, copy.deepcopy(start), CONFIG, should_stop=lambda: next(asked) == 3, checkpoint=tmp_path / "run.pt")
    resumed = copy.deepcopy(start)
    history = train(task, resumed, CONFIG, checkpoint=tmp_path / "run.pt", resume=True)
    assert rows(history).equals(rows(expected))
    assert all(torch.equal(weight, resumed.state_dict()[name]) for name, weight in whole.state_dict().items())


def test_resuming_with_another_start_policy_is_refused(tmp_path):
    train(Digits(), CausalLM(llama()), replace(CONFIG, iterations=1), checkpoint=tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="policy that the run began with"):
        train(Digits(), CausalLM(llama(seed=1)), CONFIG, checkpoint=tmp_path / "run.pt", resume=True)
    nearly = llama()
    nearly.lm_head.weight.data.mul_(1 + 1e-6)
    with pytest.raises(CheckpointError, match="policy that the run began with"):
        train(Digits(), CausalLM(nearly), CONFIG, checkpoint=tmp_path / "run.pt", resume=True)


def test_checkpoints_are_written_as_often_as_asked(tmp_path):
    seen, path = [], tmp_path / "run.pt"
    train(
        Digits(), CausalLM(llama()), replace(CONFIG, iterations=5), checkpoint=path, checkpoint_every=3,
        on_iteration=lambda row, _: seen.append(len(torch.load(path)["rows"]) if path.exists() else 0),
    )  # fmt: skip
    assert seen == [0, 1, 1, 1, 4, 4] and len(torch.load(path)["rows"]) == 6


def test_without_a_leash_no_copy_is_held_and_training_goes_on():
    policy = CausalLM(llama(), leash=False)
    assert policy.reference() is None
    history = train(Digits(), policy, replace(CONFIG, iterations=1, beta=0.0))
    assert history.frame["kl"].isna().all() and history.frame["grad_norm"][1] > 0


@pytest.mark.parametrize("build", BUILDERS)
def test_training_learns(build):
    task, policy = Digits(), CausalLM(build())
    before = greedy_accuracy(policy, task, task.held_out)
    history = train(task, policy, replace(CONFIG, iterations=25, evaluate_every=25, learning_rate=1e-2))
    rewards = history.frame["reward"].tolist()
    assert sum(rewards[-3:]) / 3 > rewards[1] + 0.3, rewards
    assert greedy_accuracy(policy, task, task.held_out) >= before


# Ends and loading


def test_all_eos_are_found_and_the_tokenizers_comes_first():
    class Tokenizer:
        eos_token_id = 5

    model = llama()
    model.generation_config.eos_token_id = [7, 5, 9]
    assert eos_ids(model, Tokenizer) == (5, 7, 9)
    model.generation_config.eos_token_id = 7
    assert eos_ids(model, Tokenizer) == (5, 7)
    Tokenizer.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="neither the tokenizer nor the model names an EOS token"):
        eos_ids(model, Tokenizer)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "no/such/folder", "empty"])
def test_a_model_that_cannot_be_had_is_explained(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no model can be loaded from .*hf download .*tiny-llama"):
        load(name)
