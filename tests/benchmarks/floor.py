"""The floor: only the matrix products of an iteration, on random tensors of the same shapes.

No program that computes these log-probs and gradients can be faster with the same products. Left out: everything else,
that is softmax, norms, GELU, sampling, copies and Python.
"""

import time

import torch
from torch import Tensor

from grpo_core import Addition, GRPOConfig, TinyGPT

Shape = tuple[int, int, int, int]  # count, rows, inner, columns: `count` products (rows, inner) @ (inner, columns)


def reading(rows: int, new: int, past: int, policy: TinyGPT) -> list[Shape]:
    """The products in which a policy reads `new` tokens in each row, with `past` tokens in its cache."""
    width, vocab = policy.token_embedding.embedding_dim, policy.token_embedding.num_embeddings
    shapes = []
    for block in policy.blocks:
        head_width = width // block.heads
        shapes += [
            (1, rows * new, width, 3 * width),
            (rows * block.heads, new, head_width, past + new),
            (rows * block.heads, new, past + new, head_width),
            (1, rows * new, width, width),
            (1, rows * new, width, 4 * width),
            (1, rows * new, 4 * width, width),
        ]
    return [*shapes, (1, rows * new, width, vocab)]


def iteration(policy: TinyGPT, config: GRPOConfig) -> dict[str, list[Shape]]:
    """The products of each piece of an iteration. A prompt is read once for its whole group."""
    prompts, completions = config.prompts_per_iteration, config.prompts_per_iteration * config.group_size
    length = len(Addition().encode("24+48="))
    prompt = reading(prompts, length, 0, policy)
    scoring = prompt + reading(completions, config.max_new_tokens - 1, length, policy)
    steps = [shape for t in range(1, config.max_new_tokens) for shape in reading(completions, 1, length + t - 1, policy)]
    return {
        "sampling": prompt + steps,
        "old log-probs": scoring,
        "reference": scoring,
        "forward": config.inner_epochs * scoring,
        "backward": config.inner_epochs * [product for shape in scoring for product in gradients(*shape)],
    }


def gradients(count: int, rows: int, inner: int, columns: int) -> list[Shape]:
    """Backward through x @ w: the gradients of x and of w, each a product as large as the first."""
    return [(count, rows, columns, inner), (count, inner, rows, columns)]


def random_tensors(shapes: list[Shape]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, rows, inner), torch.randn(n, inner, columns)) for n, rows, inner, columns in shapes]


class Floor:
    """Times the products of each piece; the random tensors are made once."""

    def __init__(self, policy: TinyGPT, config: GRPOConfig):
        self.products = {name: random_tensors(shapes) for name, shapes in iteration(policy, config).items()}

    def time_once(self) -> dict[str, float]:
        """Milliseconds of each piece, and of all."""
        times = {}
        for name, products in self.products.items():
            start = time.perf_counter()
            for x, w in products:
                torch.bmm(x, w) if len(x) > 1 else torch.mm(x[0], w[0])
            times[name] = 1000 * (time.perf_counter() - start)
        return times | {"iteration": sum(times.values())}
