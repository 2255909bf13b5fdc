"""Shared by all tests: one thread, reproducible hypothesis runs, the task, and policies small enough to enumerate."""

from itertools import product

import hypothesis
import pytest
import torch
from torch import nn

from grpo_core import Addition, Problem, TinyGPT

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def task():
    return Addition()


class Letters:
    """Another task than addition: completions of up to three of the tokens a, b and EOS. Few enough to list them all."""

    vocab, eos_id, max_new_tokens = "ab;", 2, 3

    def __init__(self):
        self.problems = [Problem("ab", "a"), Problem("bba", "bb"), Problem("b", "")]
        self.train = self.held_out = self.validation = [Problem("ab", "a"), Problem("ba", "bb"), Problem("bb", "")]

    def encode(self, text):
        return [self.vocab.index(character) for character in text]

    def decode(self, ids):
        return "".join(self.vocab[i] for i in ids).split(";")[0] + ";" * (self.eos_id in list(ids))

    def verify(self, completion, answer):
        return float(completion == answer + ";")

    def completions(self):
        """Each completion once: (C, 3) token ids, and the (C, 3) mask through the first EOS."""
        rows = sorted({row[: row.index(2) + 1] if 2 in row else row for row in product(range(3), repeat=3)})
        ids = torch.tensor([row + (2,) * (3 - len(row)) for row in rows])
        return ids, torch.tensor([[t < len(row) for t in range(3)] for row in rows])

    def log_probs(self, policy, prompt, temperature=1.0):
        """(C, 3), one completion at a time, by the plain definition: no cache, no batch, no padding. The oracle."""
        rows = []
        for row in self.completions()[0]:
            ids = torch.tensor([*self.encode(prompt), *row])[None]
            logits = policy(ids)[0, -4:-1] / temperature
            rows.append((logits - logits.exp().sum(-1, keepdim=True).log())[range(3), row])
        return torch.stack(rows)


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def tiny():
    """Make a float64 TinyGPT with random weights, wide enough apart to have opinions."""

    def make(seed=0, vocab_size=3):
        policy, generator = TinyGPT(vocab_size, width=8, heads=2, max_length=10).double(), torch.Generator().manual_seed(seed)
        for weight in policy.parameters():
            nn.init.normal_(weight, std=0.5, generator=generator)
        return policy

    return make


@pytest.fixture
def gradient():
    """The gradient of a scalar with respect to all weights of a policy, as one vector."""

    def flat(scalar, policy):
        parts = torch.autograd.grad(scalar, list(policy.parameters()), allow_unused=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(parts, policy.parameters())])

    return flat
