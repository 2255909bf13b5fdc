"""What GRPO needs with a policy of 0.5, 7 or 72 billion parameters: memory and time, computed from published configurations.

The models are built without memory, to be counted; nothing is downloaded. Left out: activations, which checkpointing keeps
small; the way models are cut over several GPUs, and the traffic between them.
"""

import heapq
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn

MODELS = {  # What Qwen2Config needs to know, from each model's config.json.
    "Qwen2.5-0.5B": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18_944, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "Qwen2.5-72B": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 29_568, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
}  # fmt: skip
WEIGHT, GRADIENT, ADAM = 2, 2, 12  # Bytes: bfloat16, bfloat16; float32 weights and Adam's two moments.
CACHED, LOGIT = 2, 4  # bfloat16, float32.
GPU_MEMORY = 80e9  # NVIDIA H100 SXM, by its data sheet: bytes, bytes a second, and bfloat16 FLOPs a second without sparsity.
BANDWIDTH, ARITHMETIC = 3.35e12, 989e12


class Size(NamedTuple):
    """Attributes:
    parameters: of the model; tied embeddings count once.
    read: parameters that a token meets. An embedding of its own is only looked up.
    adapter: parameters of a LoRA adapter of rank 1 on all linear layers but the last.
    """

    parameters: int
    read: int
    adapter: int


def size(config) -> Size:
    """Count a model that is built on torch's meta device, where tensors have shapes and no memory.

    Args:
        config: of transformers, such as Qwen2Config(**MODELS["Qwen2.5-7B"]) or what AutoConfig.from_pretrained gives.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    count = sum(weight.numel() for weight in model.parameters())
    looked_up = 0 if head.weight is embedding.weight else embedding.weight.numel()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return Size(count, count - looked_up, sum(m.in_features + m.out_features for m in linear))


def parameters(config) -> int:
    """How many parameters a model with this configuration has.

    >>> from transformers import Qwen2Config
    >>> f"{parameters(Qwen2Config(**MODELS['Qwen2.5-0.5B'])):,}"
    '494,032,768'
    """
    return size(config).parameters


@cache
def size_of(name: str) -> Size:
    """The size of one of MODELS; it is counted once."""
    from transformers import Qwen2Config

    return size(Qwen2Config(**config_of(name)))


def config_of(name: str) -> dict:
    """The arguments of Qwen2Config.

    Raises:
        ValueError: there is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"no configuration of {name!r} is kept here: choose one of {', '.join(MODELS)}")
    return MODELS[name]


def cache_bytes(name: str) -> int:
    """Bytes of the keys and values of one token: 2 · layers · key-value heads · head width · 2.

    >>> cache_bytes("Qwen2.5-7B")
    57344
    """
    config = config_of(name)
    head_width = config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_width * CACHED


def memory(
    name: str,
    trained: str = "all",
    critic: bool = False,
    leash: bool = True,
    rank: int = 16,
    rows: int = 64,
    tokens: int = 1000,
) -> pd.DataFrame:
    """Gigabytes that training needs, part by part.

    trained network   2 + 2 + 12 bytes a parameter: weights, gradients, Adam with float32 weights and two moments
    frozen network    2 bytes a parameter

    Pure float32 training, 4 + 4 + 8, takes as much; its frozen networks take 4.

    Args:
        name: one of MODELS.
        trained: "all" weights, or a "lora" adapter beside frozen weights.
        critic: whether there is one, as large as the policy and trained in the same way: PPO's.
        leash: whether there is a reference. With LoRA it costs nothing: the policy with its adapter off.
        rank: of the adapter.
        rows: completions that are sampled at a time, and as many in a micro-batch of an update.
        tokens: of a prompt and its completion.

    Returns:
        A row for each part: policy (its weights), gradients, Adam, reference, critic, cache, logits. Columns: when, which is
        "always", "sampling" or "updating"; and GB (1e9 bytes). On the way back the logits need as much again.

    Raises:
        ValueError: an unknown name, another `trained`, or a number below 1.

    Source: Rajbhandari et al. 2020, ZeRO, section 3.1, for the 16 bytes; Hu et al. 2021 for LoRA.
    """
    if trained not in ("all", "lora"):
        raise ValueError(f'trained is "all" or "lora", got {trained!r}')
    if min(rank, rows, tokens) < 1:
        raise ValueError(f"rank, rows and tokens must be at least 1, got {rank}, {rows} and {tokens}")
    total, _, adapter = size_of(name)
    learning = total if trained == "all" else rank * adapter
    frozen = 0 if trained == "all" else total
    weights, gradients, adam = WEIGHT * (learning + frozen), GRADIENT * learning, ADAM * learning
    parts = {
        "policy": ("always", weights),
        "gradients": ("always", gradients),
        "Adam": ("always", adam),
        "reference": ("always", WEIGHT * total * (leash and trained == "all")),
        "critic": ("always", (weights + gradients + adam) * critic),
        "cache": ("sampling", cache_bytes(name) * rows * tokens),
        "logits": ("updating", LOGIT * MODELS[name]["vocab_size"] * rows * tokens),
    }
    frame = pd.DataFrame(parts.values(), index=pd.Index(parts, name="part"), columns=["when", "GB"])
    return frame.assign(GB=frame["GB"] / 1e9)


def peak(frame: pd.DataFrame) -> float:
    """The most gigabytes of a table of `memory` that are held at the same time: sampling and updating take turns."""
    held = frame.groupby("when")["GB"].sum()
    return float(held["always"] + max(held["sampling"], held["updating"]))


def gpus_needed(gigabytes: float, each: float = GPU_MEMORY) -> int:
    """How many GPUs at least, if everything could be divided among them without waste.

    >>> gpus_needed(79.9), gpus_needed(80.1)
    (1, 2)
    """
    return int(-(-gigabytes * 1e9 // each))


def decode_speed(name: str, batch: int, tokens: int = 1000, gpus: int = 1, passes: int = 5) -> dict:
    """How fast completions can be written at best, against reading them in one pass: a roofline.

    seconds of a step   max(bytes read / bandwidth, FLOPs / FLOPs a second)
    bytes               of all weights, and of the keys and values of what is written so far
    FLOPs               2 for each weight and completion

    To write is one step for each token. To read, `batch` · `tokens` tokens go through the weights in a single step.

    Args:
        name: one of MODELS.
        batch: completions written at the same time.
        tokens: of each, all of the same length; prompts are left out.
        gpus: their bandwidth and arithmetic add up, as if they needed not talk to each other.
        passes: what an iteration takes besides, in readings of the same tokens. Five: policy and reference score them, and
            one gradient step reads them and goes back, which costs twice as much.

    Returns:
        name; batch; tokens_per_second; limit, "memory" or "arithmetic", whatever took longer in most steps; writing and
        reading, in seconds; share: of the time of an iteration that writing takes. Real systems are slower in all of it.

    Raises:
        ValueError: an unknown name, or a number below 1.

    Source: Williams et al. 2009, "Roofline"; for the FLOPs Kaplan et al. 2020, section 2.1.
    """
    if min(batch, tokens, gpus, passes) < 1:
        raise ValueError(f"batch, tokens, gpus and passes must be at least 1, got {batch}, {tokens}, {gpus} and {passes}")
    read = size_of(name).read
    moving = (WEIGHT * read + cache_bytes(name) * batch * np.arange(tokens)) / (gpus * BANDWIDTH)
    computing = 2 * read * batch / (gpus * ARITHMETIC)
    writing = float(np.maximum(moving, computing).sum())
    reading = max(float(moving[0]), computing * tokens)
    return {
        "name": name,
        "batch": batch,
        "tokens_per_second": batch * tokens / writing,
        "limit": "memory" if (moving > computing).mean() > 0.5 else "arithmetic",
        "writing": writing,
        "reading": reading,
        "share": writing / (writing + passes * reading),
    }


def steps_needed(lengths: Sequence[int], slots: int, refill: bool) -> int:
    """How many decoding steps completions of these lengths take, `slots` of them at a time, in the given order.

    Args:
        lengths: tokens of each completion.
        slots: completions in a step.
        refill: false waits for the longest of each batch; true gives a slot that is free to the next completion at once,
            which is called continuous batching.

    Raises:
        ValueError: there are no lengths, one is below 1, or there is no slot.

    Source: Yu et al. 2022, Orca, for the refilling; vLLM does it, too.

    >>> steps_needed([2, 9, 3, 3], 2, refill=False), steps_needed([2, 9, 3, 3], 2, refill=True)
    (12, 9)
    """
    if len(lengths) == 0 or min(lengths) < 1 or slots < 1:
        raise ValueError(f"at least one length and one slot are needed, each length at least 1; got {lengths!r}, {slots} slots")
    if not refill:
        return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))
    free = [0] * slots  # The step at which each slot gets free.
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)
