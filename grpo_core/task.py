"""The task: two-digit sums, written as text and marked by an exact verifier.

One problem is a prompt such as "24+48=" and the answer "72". The policy should write "72;": the semicolon is the
end-of-sequence token (EOS), and a completion that never writes it has not answered. A task is anything with the public
attributes of `Addition`; training uses nothing else. Left out: subtraction, carrying hints, curricula.
"""

import random
from typing import NamedTuple


class Problem(NamedTuple):
    """A prompt and its true answer, both as text; the answer is written without the EOS."""

    prompt: str
    answer: str


class Addition:
    """All sums of two numbers with `digits` digits each, split into three disjoint parts.

    Attributes:
        vocab: the characters; a token id is an index into it.
        eos_id: the id of ";", which ends a completion. It also fills rows up behind their end; masks tell the two apart.
        max_new_tokens: the longest answer, EOS included.
        train: the problems that any training may see.
        validation: up to 400 problems for choosing settings.
        held_out: up to 400 problems that are only ever reported.
        example: a training problem that is in the first batch of each run, so that readers can follow a group they know.

    The parts are split by unordered pair: where "24+48=" is held out, "48+24=" is not trained on either.

    Raises:
        ValueError: `digits` is not 1, 2 or 3.

    >>> task = Addition()
    >>> task.verify("72;", "72"), task.verify("73;", "72"), task.verify("72", "72")
    (1.0, 0.0, 0.0)
    >>> task.decode(task.encode("24+48="))
    '24+48='
    """

    vocab = "0123456789+=;"
    eos_id = vocab.index(";")

    def __init__(self, digits: int = 2):
        if not isinstance(digits, int) or digits not in (1, 2, 3):
            raise ValueError(f"digits must be 1, 2 or 3, got {digits!r}: longer sums do not fit in a list of all problems")
        low = 10 ** (digits - 1) if digits > 1 else 0
        numbers = range(low, 10**digits)
        self.max_new_tokens = digits + 2
        self.example = self._problem(24, 48) if digits == 2 else self._problem(numbers[2], numbers[4])

        rng = random.Random(0)  # The split is part of the task: one fixed split, whatever the seed of the run.
        pairs = [(a, b) for a in numbers for b in numbers if a <= b]
        rng.shuffle(pairs)
        pairs.sort(key=lambda pair: self._problem(*pair) == self.example)  # Stable: the example goes last, to training.
        size = min(400, len(pairs) // 10)
        held_out, validation, rest = pairs[:size], pairs[size : 2 * size], pairs[2 * size :]
        self.held_out = [self._problem(*rng.sample(pair, 2)) for pair in held_out]
        self.validation = [self._problem(*rng.sample(pair, 2)) for pair in validation]
        self.train = [self._problem(*pair) for a, b in rest for pair in sorted({(a, b), (b, a)})]

    @staticmethod
    def _problem(a: int, b: int) -> Problem:
        return Problem(f"{a}+{b}=", str(a + b))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; a ValueError names characters outside the vocabulary."""
        unknown = sorted(set(text) - set(self.vocab))
        if unknown:
            raise ValueError(f"{text!r} has characters outside the vocabulary {self.vocab!r}: {unknown}")
        return [self.vocab.index(character) for character in text]

    def decode(self, ids) -> str:
        """The text of token ids, up to and including the first EOS."""
        text = "".join(self.vocab[int(i)] for i in ids)
        answer, eos, _ = text.partition(";")
        return answer + eos

    def verify(self, completion: str, answer: str) -> float:
        """The reward: 1.0 if `completion` is exactly the answer and the EOS, else 0.0."""
        return float(completion == f"{answer};")
