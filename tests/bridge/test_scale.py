"""Memory and time at scale, against published counts, closed forms, other libraries and step-by-step simulation."""

from itertools import product

import numpy as np
import pytest

pytest.importorskip("transformers", reason='needs pip install -e ".[real]"')

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from grpo_core.bridge.causal_lm import add_lora
from grpo_core.bridge.scale import (
    ARITHMETIC,
    BANDWIDTH,
    MODELS,
    cache_bytes,
    decode_speed,
    gpus_needed,
    memory,
    parameters,
    peak,
    size,
    size_of,
    steps_needed,
)
from grpo_core.rivals.at_scale import at_scale, totals

each_model = pytest.mark.parametrize("name", MODELS)
PUBLISHED = {"Qwen2.5-0.5B": 494_032_768, "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-72B": 72_706_203_648}


def closed_form(config, biases):
    """Parameters of a Llama-like model, term by term."""
    width, ffn, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = width * config["num_key_value_heads"] // config["num_attention_heads"]
    attention = 2 * width * width + 2 * width * narrow + biases * (width + 2 * narrow)
    layer = attention + 3 * width * ffn + 2 * width
    return words * width * (2 - config["tie_word_embeddings"]) + config["num_hidden_layers"] * layer + width


@each_model
def test_parameters_are_the_published_ones_and_those_of_the_closed_form(name):
    counted = parameters(Qwen2Config(**MODELS[name]))
    assert counted == PUBLISHED[name] == closed_form(MODELS[name], biases=1) == size_of(name).parameters


def test_other_architectures_are_counted_as_they_are_when_built():
    llama = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 11, "tie_word_embeddings": False}  # fmt: skip
    assert parameters(LlamaConfig(**llama)) == closed_form(llama, biases=0)
    for config in (LlamaConfig(**llama), GPT2Config(vocab_size=11, n_positions=24, n_embd=16, n_layer=2, n_head=2)):
        built = AutoModelForCausalLM.from_config(config)
        assert parameters(config) == sum(weight.numel() for weight in built.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_meets_all_weights_but_an_embedding_of_its_own(tied):
    config = Qwen2Config(**MODELS["Qwen2.5-0.5B"] | {"tie_word_embeddings": tied})
    assert size(config).parameters - size(config).read == (0 if tied else 151_936 * 896)


def test_the_adapter_has_as_many_parameters_as_peft_trains():
    with torch.device("meta"):
        model = add_lora(AutoModelForCausalLM.from_config(Qwen2Config(**MODELS["Qwen2.5-0.5B"])), 16)
    assert 16 * size_of("Qwen2.5-0.5B").adapter == sum(w.numel() for w in model.parameters() if w.requires_grad)


@each_model
@pytest.mark.parametrize(
    ("method", "critic", "leash"),
    [
        ("GRPO", False, True),
        ("GRPO, beta 0", False, False),
        ("PPO, verifier", True, True),
        ("PPO, verifier, beta 0", True, False),
    ],
)
def test_state_is_that_of_the_shopping_list(name, method, critic, leash):
    frame = memory(name, critic=critic, leash=leash)
    state = frame[frame["when"] == "always"]["GB"].sum()
    assert state == pytest.approx(totals(at_scale(PUBLISHED[name])).loc[method, "state"] / 1e9)


def test_seven_billion_parameters_part_by_part():
    gigabytes, count = memory("Qwen2.5-7B", critic=True, rows=3, tokens=500)["GB"], PUBLISHED["Qwen2.5-7B"] / 1e9
    parts = {"policy": 2 * count, "gradients": 2 * count, "Adam": 12 * count, "reference": 2 * count, "critic": 16 * count,
             "cache": 3 * 500 * 57_344 / 1e9, "logits": 3 * 500 * 152_064 * 4 / 1e9}  # fmt: skip
    assert gigabytes.to_dict() == pytest.approx(parts)


@each_model
def test_lora_trains_little_and_needs_no_reference(name):
    parts, count = memory(name, trained="lora", critic=True, rank=8)["GB"] * 1e9, PUBLISHED[name]
    adapter = 8 * size_of(name).adapter
    assert adapter < 0.01 * count and parts["reference"] == 0
    assert parts["policy"] == pytest.approx(2 * (count + adapter))
    assert parts["gradients"] + parts["Adam"] == pytest.approx(14 * adapter)
    assert parts["critic"] == pytest.approx(2 * count + 16 * adapter)


def test_the_cache_is_as_large_as_the_one_that_transformers_fills():
    config = Qwen2Config(**MODELS["Qwen2.5-0.5B"] | {"num_hidden_layers": 2, "vocab_size": 20})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    filled = model(torch.ones(3, 5, dtype=torch.long), use_cache=True).past_key_values
    held = sum(part.nbytes for layer in filled.layers for part in (layer.keys, layer.values))
    assert held == 3 * 5 * cache_bytes("Qwen2.5-0.5B") * 2 // 24


def test_sampling_and_updating_take_turns():
    frame = memory("Qwen2.5-0.5B", rows=8)
    held, cache, logits = frame["GB"][:5].sum(), frame["GB"]["cache"], frame["GB"]["logits"]
    assert peak(frame) == pytest.approx(held + max(cache, logits)) and logits > cache > 0
    swapped = frame.assign(GB=frame["GB"].replace({cache: logits, logits: cache}))
    assert peak(swapped) == pytest.approx(peak(frame))


def test_gpus_are_whole():
    assert [gpus_needed(x) for x in (0.1, 79.999, 80.0, 80.001, 800.0)] == [1, 1, 1, 2, 10]


@each_model
@pytest.mark.parametrize("batch", [1, 64, 4096])
def test_writing_is_the_slower_of_two_clocks_step_by_step(name, batch):
    speed, read = decode_speed(name, batch, tokens=50), size_of(name).read
    seconds = 0.0
    for written in range(50):
        clocks = (2 * read + batch * written * cache_bytes(name)) / BANDWIDTH, 2 * read * batch / ARITHMETIC
        seconds += max(clocks)
    assert speed["writing"] == pytest.approx(seconds) and speed["tokens_per_second"] == pytest.approx(50 * batch / seconds)
    assert speed["share"] == pytest.approx(seconds / (seconds + 5 * speed["reading"]))


def test_one_completion_waits_for_memory_and_a_large_batch_for_arithmetic():
    one, many = (decode_speed("Qwen2.5-7B", batch, tokens=20) for batch in (1, 1000))
    assert (one["limit"], many["limit"]) == ("memory", "arithmetic")
    read = size_of("Qwen2.5-7B").read
    assert one["tokens_per_second"] == pytest.approx(BANDWIDTH / (2 * read), rel=1e-3)
    assert many["tokens_per_second"] == pytest.approx(ARITHMETIC / (2 * read), rel=1e-3)
    assert one["share"] == pytest.approx(20 / 25, rel=1e-3), "20 steps and 5 passes, and each waits for the weights"
    assert many["share"] == pytest.approx(1 / 6), "with the same limit, writing is one pass of six"


def test_a_larger_batch_writes_more_a_second_and_takes_a_smaller_share():
    speeds = [decode_speed("Qwen2.5-7B", batch) for batch in (1, 4, 16, 64, 256)]
    assert (np.diff([speed["tokens_per_second"] for speed in speeds]) > 0).all()
    assert (np.diff([speed["share"] for speed in speeds]) < 0).all()


def test_gpus_share_the_work_evenly():
    one, four = (decode_speed("Qwen2.5-72B", 16, gpus=gpus) for gpus in (1, 4))
    assert four["writing"] == pytest.approx(one["writing"] / 4) and four["share"] == pytest.approx(one["share"])


def simulated(lengths, slots, refill):
    """One step at a time: who is in a slot, who waits."""
    waiting, running, steps = list(lengths), [], 0
    while waiting or running:
        if refill or not running:
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_steps_are_those_of_a_simulation(slots, refill):
    for count in (1, 2, 4):
        for lengths in product((1, 2, 5), repeat=count):
            assert steps_needed(lengths, slots, refill) == simulated(lengths, slots, refill)


def test_refilling_never_takes_longer_and_never_less_than_the_work_allows():
    lengths = np.random.default_rng(0).geometric(0.05, size=200).tolist()
    waiting, refilled = (steps_needed(lengths, 16, refill) for refill in (False, True))
    assert max(max(lengths), sum(lengths) / 16) <= refilled < waiting
    assert steps_needed([7] * 32, 16, True) == steps_needed([7] * 32, 16, False) == 14


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory("Qwen"), "no configuration of 'Qwen'.*choose one of Qwen2.5-0.5B"),
        (lambda: memory("Qwen2.5-7B", trained="some"), 'trained is "all" or "lora"'),
        (lambda: memory("Qwen2.5-7B", rows=0), "at least 1, got 16, 0 and 1000"),
        (lambda: memory("Qwen2.5-7B", tokens=0), "at least 1"),
        (lambda: memory("Qwen2.5-7B", trained="lora", rank=0), "at least 1"),
        (lambda: cache_bytes("Qwen"), "no configuration of 'Qwen'"),
        (lambda: decode_speed("Qwen", 1), "no configuration of 'Qwen'"),
        (lambda: decode_speed("Qwen2.5-7B", 0), "at least 1"),
        (lambda: decode_speed("Qwen2.5-7B", 1, tokens=0), "at least 1"),
        (lambda: steps_needed([], 4, True), "at least one length"),
        (lambda: steps_needed([3, 0], 4, True), "each length at least 1"),
        (lambda: steps_needed([3], 0, False), "0 slots"),
    ],
)
def test_bad_input_is_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()
