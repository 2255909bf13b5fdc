"""Word problems as a task: a tokenizer turns them into tokens, a verifier reads the final answer.

It has the attributes of `Addition`, which is all that training uses. Left out: system prompts, several turns, what
some templates can be told besides (a date, whether to think), rewards for form.
"""

from collections.abc import Iterable

from grpo_core.bridge.answers import is_right
from grpo_core.bridge.gsm8k import Splits

# What a model that was not tuned to it is told: where the verifier finds the answer.
INSTRUCTION = "Think step by step. On the last line, write #### and then the final answer as a number."


class TextTask:
    """Problems in words, for a model with this tokenizer.

    Attributes:
        train, validation, held_out: the problems; the prompt of a `Problem` is the bare question.
        eos_id: ids of the tokens that end a completion.
        max_new_tokens: the longest completion, EOS included.

    Args:
        tokenizer: of Hugging Face. If it has a chat template, the question is the user's turn; else it is put between
            "Question:" and "Answer:".
        problems: the three parts.
        eos_id: see `causal_lm.eos_ids`.
        max_new_tokens: as above.
        instruction: added to each question on a line of its own.
    """

    def __init__(self, tokenizer, problems: Splits, eos_id: tuple[int, ...], max_new_tokens: int = 256, instruction: str = ""):
        self.tokenizer, self.eos_id, self.max_new_tokens, self.instruction = tokenizer, eos_id, max_new_tokens, instruction
        self.train, self.validation, self.held_out = problems
        self.ends = tuple(filter(None, (tokenizer.decode([i]) for i in eos_id)))  # An end without text could not be seen.

    def encode(self, question: str) -> list[int]:
        """Token ids of the whole prompt, up to where the model is to answer."""
        text = f"{question}\n{self.instruction}" if self.instruction else question
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode(f"Question: {text}\nAnswer:")
        turn = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, up to and including the first EOS."""
        ids = list(ids)
        end = next((place for place, i in enumerate(ids, start=1) if i in self.eos_id), len(ids))
        return self.tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)

    def verify(self, completion: str, answer: str) -> float:
        """The reward: 1.0 if the completion has ended and its final answer is right, else 0.0."""
        ended = next((end for end in self.ends if completion.endswith(end)), None)
        return float(ended is not None and is_right(completion.removesuffix(ended), answer))
