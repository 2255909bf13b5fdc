"""Small models of Hugging Face and their tokenizer, made in code: all of the bridge can be tried without any download.

The shipped Llama learned to calculate, and to be careless: its teacher slipped in more than half of the solutions. So it often
writes what it does not have to get wrong, and GRPO can bring out the rest. Left out: pretraining.
"""

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from grpo_core.bridge.causal_lm import CausalLM, eos_ids
from grpo_core.bridge.gsm8k import solution
from grpo_core.bridge.text_task import TextTask
from grpo_core.bridge.word_problems import word_problem_records, word_problem_splits
from grpo_core.evaluate import greedy_accuracy
from grpo_core.warm_start import IGNORE

FOLDER = Path(__file__).parents[1] / "data" / "tiny_llama"
EOS = ("<|end|>", "<|endoftext|>")  # Chat models often have two: the end of a turn, and the end of a text.
SPECIAL_TOKENS = (*EOS, "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ('user', 'assistant') -%}
        {{- raise_exception('the roles are user and assistant, got ' + message['role']) -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
MAX_LENGTH = 256
MAX_NEW_TOKENS = 28  # The longest solution has 26 tokens.
# Chosen on validation problems. Training is chaotic, and rounding differs between processors: the shipped folder is what
# everybody starts from.
RECIPE = {"seed": 0, "steps": 2400, "batch_size": 32, "learning_rate": 1.5e-3, "slips": 0.6}


def tiny_start() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The shipped Llama with 139,000 parameters, and its tokenizer. It can calculate, and often slips."""
    with no_bars():
        return AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)


@contextmanager
def no_bars():
    """Half a megabyte is loaded before a bar could be read."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def rebuild(folder: Path | str) -> str:
    """Make the shipped folder again: train the tokenizer, then a fresh Llama by `RECIPE`. Returns its accuracy, in words."""
    records, _, _ = word_problem_records()
    tokenizer = train_tokenizer(record[key] for record in records for key in ("question", "answer"))
    model = tiny_llama(tokenizer, seed=RECIPE["seed"])
    fine_tune(model, tokenizer, records, **RECIPE)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    task = TextTask(tokenizer, word_problem_splits(), eos_ids(model, tokenizer), MAX_NEW_TOKENS)
    return f"greedy accuracy on validation problems {greedy_accuracy(CausalLM(model), task, task.validation)}"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text can be written, and what is frequent in `texts` takes one token.

    Digits are always tokens of their own, so that numbers of all lengths are made of the same ten. There is no pad token, as
    in Llama's own tokenizer.

    Args:
        texts: to learn from. The same texts give the same tokenizer.
        vocab_size: the most tokens it may have; fewer if all words are whole before.

    Raises:
        ValueError: `vocab_size` is too small for the 256 bytes and the special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least}, one token for each byte and special token, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"special_tokens": list(SPECIAL_TOKENS), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **settings))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS[0], chat_template=CHAT_TEMPLATE)


def tiny_llama(tokenizer, width: int = 64, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama: rotary positions, RMSNorm, gated perceptron.

    Args:
        tokenizer: gives the vocabulary and the EOS tokens.
        width: of the residual stream, a multiple of 4, the number of heads.
        layers: number of blocks.
        seed: of the weights.
    """
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.04,  # With half of it, sums are learned much more slowly.
        **_of_tokenizer(tokenizer),
    )
    return _build(LlamaForCausalLM, config, seed)


def tiny_gpt2(tokenizer, width: int = 64, layers: int = 2, seed: int = 0, dropout: float = 0.0) -> GPT2LMHeadModel:
    """A random GPT-2: learned positions, LayerNorm, and dropout. Arguments as for `tiny_llama`.

    Args:
        dropout: the rate, everywhere.
    """
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": MAX_LENGTH}
    return _build(GPT2LMHeadModel, GPT2Config(**sizes, **rates, **_of_tokenizer(tokenizer)), seed)


def _of_tokenizer(tokenizer) -> dict:
    eos = tokenizer.convert_tokens_to_ids(list(EOS))
    return {"vocab_size": len(tokenizer), "eos_token_id": eos, "bos_token_id": None, "tie_word_embeddings": True}


def _build(kind: type[PreTrainedModel], config, seed: int) -> PreTrainedModel:
    """A model whose weights depend on the seed alone; the global generator is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    return model


def fine_tune(
    model: PreTrainedModel,
    tokenizer,
    records: Sequence[dict[str, str]],
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 1.5e-3,
    seed: int = 0,
    slips: float = 0.0,
) -> None:
    """Teach a model the worked solutions of records, in place, by cross-entropy on each solution and its EOS.

    Args:
        model: a causal language model; it keeps its mode, so that dropout acts if it did.
        tokenizer: with a chat template: the question is the user's turn, the solution the assistant's.
        records: in GSM8K's format.
        steps: gradient steps.
        batch_size: records in a step, drawn with repetition.
        learning_rate: of AdamW with betas 0.9 and 0.99.
        seed: of the batches.
        slips: share of the solutions that are taught with a slip, each time drawn anew.

    Raises:
        ValueError: there are no records, `steps` is negative, or `slips` is no share.
    """
    if not records or steps < 0 or not 0 <= slips <= 1:
        raise ValueError(f"give records, steps >= 0 and slips in [0, 1]; got {len(records)} records, {steps}, {slips}")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), fused=True)
    rows = [encode_record(tokenizer, record) for record in records]
    slipped = [encode_record(tokenizer, with_slip(record)) for record in records] if slips else rows
    for _ in range(steps):
        batch = torch.randint(len(rows), (batch_size,), generator=generator).tolist()
        careless = (torch.rand(batch_size, generator=generator) < slips).tolist()
        loss = solution_loss(model, [(slipped if slip else rows)[i] for i, slip in zip(batch, careless)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def with_slip(record: dict[str, str]) -> dict[str, str]:
    r"""The record as a careless teacher solves it: the last result is ten off.

    >>> with_slip({"question": "…", "answer": "24 + 48 = 72\n#### 72"})["answer"]
    '24 + 48 = 62\n#### 62'
    """
    steps, _, result = record["answer"].rpartition("\n#### ")
    slip = int(result.replace(",", ""))
    slip += -10 if slip >= 10 else 10
    return record | {"answer": f"{steps.rpartition(' = ')[0]} = {slip:,}\n#### {slip:,}"}


def encode_record(tokenizer, record: dict[str, str]) -> tuple[Tensor, Tensor]:
    """Token ids of a question and its solution, and the targets among them: the solution and its EOS; the rest is `IGNORE`."""
    turn = [{"role": "user", "content": record["question"]}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(solution(record), add_special_tokens=False) + [tokenizer.eos_token_id]
    return torch.tensor(prompt + answer), torch.tensor([IGNORE] * len(prompt) + answer)


def solution_loss(model: PreTrainedModel, rows: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean cross-entropy of the targets of `encode_record`, each given all tokens before it.

    Rows are filled up on the right, where nothing looks: attention is causal, and the filling has no targets.
    """
    ids, targets = zip(*rows)
    logits = model(input_ids=pad_sequence(ids, batch_first=True), use_cache=False).logits[:, :-1]
    targets = pad_sequence(targets, batch_first=True, padding_value=IGNORE)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)
