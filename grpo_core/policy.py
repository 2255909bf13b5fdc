"""TinyGPT: a decoder-only transformer of about 100,000 parameters, with a key-value cache.

It is GPT-2 in small: learned positions, pre-norm blocks, causal attention. Left out: dropout (old and new log-probs must
come from the same function), weight tying, and everything that pays only at scale. The call takes the argument names of
Hugging Face models, so that scoring and updates, which need no cache, also run on those.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KVCache:
    """Keys and values of the tokens that a policy has already read, one pair for each layer.

    Reading a prompt once and expanding its cache to the whole group is what makes sampling and scoring cheap. Gradients
    flow through it.
    """

    def __init__(self):
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """The number of tokens held."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add (N, heads, T, width) keys and values of new tokens; return those of all tokens."""
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self.layers[layer] = key, value
        return key, value

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order and as often as named: rows 0, 0, 1, 1 make groups of two from two prompts."""
        for layer, (key, value) in self.layers.items():
            self.layers[layer] = key.index_select(0, rows), value.index_select(0, rows)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor, cache: KVCache, layer: int) -> Tensor:
        x = x + self.attend(self.attention_norm(x), mask, cache, layer)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))

    def attend(self, x: Tensor, mask: Tensor, cache: KVCache, layer: int) -> Tensor:
        rows, length, width = x.shape
        heads = self.query_key_value(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        key, value = cache.append(layer, key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))


class TinyGPT(nn.Module):
    """A policy: token ids in, logits of each next token out.

    Args:
        vocab_size: number of tokens.
        width: of the residual stream; must be a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads in a block.
        max_length: the longest text, prompt and completion together, in tokens.

    Raises:
        ValueError: `width` is not a multiple of `heads`.

    >>> policy = TinyGPT(vocab_size=13)
    >>> policy(torch.tensor([[2, 4, 10]])).shape
    torch.Size([1, 3, 13])
    >>> sum(p.numel() for p in policy.parameters())
    102797
    """

    def __init__(self, vocab_size: int, width: int = 64, layers: int = 2, heads: int = 4, max_length: int = 16):
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width {width} and heads {heads}")
        self.max_length = max_length
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits of the token that follows each token.

        Args:
            token_ids: (N, T), the new tokens.
            attention_mask: (N, cached + T), false at padding, which nothing may attend to.
            position_ids: (N, T). By default each row counts on from the cache; left padding needs its own positions.
            cache: what was read before; it is extended by the new tokens.

        Returns:
            (N, T, vocab_size)

        Raises:
            ValueError: cache and new tokens together are longer than `max_length`.
        """
        cache = KVCache() if cache is None else cache
        past, new = len(cache), token_ids.shape[1]
        if past + new > self.max_length:
            raise ValueError(
                f"{past + new} tokens do not fit in this policy's context of {self.max_length}: "
                "shorten the prompt, lower max_new_tokens, or build the policy with a larger max_length"
            )
        if position_ids is None:
            position_ids = torch.arange(past, past + new, device=token_ids.device)
        x = self.token_embedding(token_ids) + self.position_embedding(position_ids)
        mask = self._mask(past, new, attention_mask, token_ids.device)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, cache, layer)
        return self.head(self.norm(x))

    @staticmethod
    def _mask(past: int, new: int, attention_mask: Tensor | None, device) -> Tensor:
        """True where a new token (row) may attend to a token (column): not to later ones, not to padding."""
        causal = torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)
        if attention_mask is None:
            return causal
        itself = torch.eye(new, past + new, dtype=torch.bool, device=device).roll(past, dims=1)
        return causal & (attention_mask.bool()[:, None, None, :] | itself)  # A row with nothing to attend to gives nan.
