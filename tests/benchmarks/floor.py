"""The floor: only the products with weight matrices, on random tensors of the same shapes.

A program that reads each prompt once and each completion on its own cannot be faster. (One that also reads equal
completions once can.) Left out: attention, softmax, norms, GELU, sampling, copies and Python.
"""

import time

import torch

from grpo_core import Addition, GRPOConfig, TinyGPT

Shape = tuple[int, int, int]  # (rows, inner) @ (inner, columns)


def reading(tokens: int, policy: TinyGPT) -> list[Shape]:
    """The products in which a policy reads `tokens` tokens, whatever rows they stand in."""
    linear = [module for module in policy.modules() if isinstance(module, torch.nn.Linear)]
    return [(tokens, layer.in_features, layer.out_features) for layer in linear]


def iteration(policy: TinyGPT, config: GRPOConfig) -> dict[str, list[Shape]]:
    """The products of each piece of an iteration."""
    completions = config.prompts_per_iteration * config.group_size
    prompts = reading(config.prompts_per_iteration * len(Addition().encode("24+48=")), policy)
    read = config.max_new_tokens - 1  # The last token of a completion is predicted, but never read.
    scoring = prompts + reading(completions * read, policy)
    return {
        "sampling": prompts + read * reading(completions, policy),
        "old log-probs": scoring,
        "reference": scoring,
        "forward": config.inner_epochs * scoring,
        "backward": config.inner_epochs * [product for shape in scoring for product in gradients(*shape)],
    }


def gradients(rows: int, inner: int, columns: int) -> list[Shape]:
    """Backward through x @ w: the gradients of x and of w, each a product as large as the first."""
    return [(rows, columns, inner), (inner, rows, columns)]


class Floor:
    """Times the products of each piece; the random tensors are made once."""

    def __init__(self, policy: TinyGPT, config: GRPOConfig):
        self.products = {
            name: [(torch.randn(rows, inner), torch.randn(inner, columns)) for rows, inner, columns in shapes]
            for name, shapes in iteration(policy, config).items()
        }

    def time_once(self) -> dict[str, float]:
        """Milliseconds of each piece, and of all."""
        times = {}
        for name, products in self.products.items():
            start = time.perf_counter()
            for x, w in products:
                x @ w
            times[name] = 1000 * (time.perf_counter() - start)
        return times | {"iteration": sum(times.values())}
