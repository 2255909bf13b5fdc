"""TinyGPT: a decoder whose cache, positions and padding change nothing but the speed."""

import math

import pytest
import torch
from torch.testing import assert_close

from grpo_core import TinyGPT
from grpo_core.policy import KVCache
from grpo_core.rollout import positions

IDS = torch.tensor([[0, 1, 2, 1, 0, 2], [2, 2, 0, 1, 1, 0]])


def norm(x, layer):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def by_the_book(policy, ids):
    """Logits of one text, one token, one head at a time: softmax(q · k / √width) over the past."""
    x = torch.stack([policy.token_embedding.weight[i] + policy.position_embedding.weight[t] for t, i in enumerate(ids)])
    for block in policy.blocks:
        width = x.shape[1] // block.heads
        q, k, v = (norm(x, block.attention_norm) @ block.query_key_value.weight.T + block.query_key_value.bias).chunk(3, dim=1)
        mixed = torch.zeros_like(x)
        for t in range(len(ids)):
            for head in (slice(h * width, (h + 1) * width) for h in range(block.heads)):
                weights = (k[: t + 1, head] @ q[t, head] / math.sqrt(width)).exp()
                mixed[t, head] = weights @ v[: t + 1, head] / weights.sum()
        x = x + mixed @ block.attention_out.weight.T + block.attention_out.bias
        h = norm(x, block.mlp_norm) @ block.mlp_in.weight.T + block.mlp_in.bias
        h = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
        x = x + h @ block.mlp_out.weight.T + block.mlp_out.bias
    return norm(x, policy.norm) @ policy.head.weight.T + policy.head.bias


def test_logits_are_those_of_the_textbook(tiny):
    policy = tiny()
    with torch.no_grad():
        assert_close(policy(IDS), torch.stack([by_the_book(policy, ids) for ids in IDS]))


@pytest.mark.parametrize("t", range(1, 6))
def test_no_token_sees_a_later_one(tiny, t):
    policy, other = tiny(), IDS.clone()
    other[:, t:] = (other[:, t:] + 1) % 3
    assert torch.equal(policy(IDS)[:, :t], policy(other)[:, :t])
    assert not torch.equal(policy(IDS)[:, t], policy(other)[:, t])


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5), (3,), (2, 5)])
def test_reading_in_pieces_with_the_cache_gives_the_same_logits_and_gradients(tiny, gradient, cuts):
    policy, cache = tiny(), KVCache()
    pieces = torch.cat([policy(ids, cache=cache) for ids in IDS.tensor_split(cuts, dim=1)], dim=1)
    assert len(cache) == 6
    assert_close(pieces, policy(IDS))
    assert_close(gradient(pieces.sin().sum(), policy), gradient(policy(IDS).sin().sum(), policy))


def test_copies_of_a_cached_row_are_neighbors(tiny):
    policy, cache = tiny(), KVCache()
    policy(IDS[:, :3], cache=cache)
    cache.take(torch.tensor([0, 0, 1]))
    assert_close(policy(IDS[[0, 0, 1], 3:], cache=cache), policy(IDS)[[0, 0, 1], 3:])


@pytest.mark.parametrize("filling", [0, 1, 2])
def test_left_padding_changes_nothing_whatever_stands_in_it(tiny, filling):
    policy = tiny()
    padded = torch.cat([torch.full((2, 3), filling), IDS], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 6] * 2)
    assert_close(policy(padded, mask, positions(mask))[:, 3:], policy(IDS))


def test_padding_itself_gives_no_nan_in_value_or_gradient(tiny, gradient):
    policy, mask = tiny(), torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6])
    logits = policy(IDS, mask, positions(mask))
    assert logits.isfinite().all()
    assert gradient(logits[0, -1].sum(), policy).isfinite().all()


@pytest.mark.parametrize("read, new", [(0, 11), (8, 3), (10, 1)])
def test_text_beyond_the_context_is_refused_with_the_cache_counted(tiny, read, new):
    policy, cache = tiny(), KVCache()
    if read:
        policy(torch.zeros(1, read, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match=r"11 tokens .* context of 10.*max_length"):
        policy(torch.zeros(1, new, dtype=torch.long), cache=cache)


def test_width_must_divide_among_the_heads():
    with pytest.raises(ValueError, match="width must be a multiple of heads"):
        TinyGPT(3, width=10, heads=4)
