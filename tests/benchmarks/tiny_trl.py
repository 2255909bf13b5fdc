"""TRL's GRPOTrainer on a small random model for `Addition`, without any download.

The benchmark times it, and tests/test_trl.py compares weights with it. transformers and trl are imported inside the
functions: that takes seconds, and not everybody has them.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from grpo_core import Addition, Problem


def trl_is_installed() -> bool:
    return find_spec("trl") is not None


def quiet_and_offline() -> None:
    """Call it before the first import of trl: nothing is looked up in the network, and no advice is printed."""
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.filterwarnings("ignore", module="trl|transformers|torch.utils.data")
    from transformers.utils import logging

    logging.disable_progress_bar()


def character_tokenizer():
    """A Hugging Face tokenizer with the token ids of `Addition`. Its EOS is also its padding, as in `Rollout`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {character: i for i, character in enumerate(Addition.vocab)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=";"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=";", pad_token=";", padding_side="left")


def random_gpt2(width: int = 64, layers: int = 2, heads: int = 4, seed: int = 0):
    """GPT-2 in the size of `TinyGPT`, without dropout: positions are learned and absolute."""
    from transformers import GPT2Config, GPT2LMHeadModel

    eos = Addition.eos_id
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(Addition.vocab), n_positions=16, n_embd=width, n_layer=layers, n_head=heads,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=eos, eos_token_id=eos, pad_token_id=eos,
        )
    )  # fmt: skip


def random_llama(width: int = 32, layers: int = 2, heads: int = 2, seed: int = 0):
    """A small Llama: positions are rotary, so that only their differences matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    eos = Addition.eos_id
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(Addition.vocab), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=16,
            bos_token_id=eos, eos_token_id=eos, pad_token_id=eos,
        )
    )  # fmt: skip


def make_trainer(
    model, problems: Sequence[Problem], folder: Path, optimizer=None, rollout_func=None, callbacks=None, **settings
):
    """A GRPOTrainer for `model` on `problems`, rewarded by `Addition.verify`; `settings` are those of TRL's GRPOConfig."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    model.save_pretrained(folder)  # The trainer reads its reference from there.
    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant", use_bias_correction_kl=False, **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=type(model).from_pretrained(folder),
        reward_funcs=verifier_reward(),
        args=arguments,
        train_dataset=Dataset.from_list([problem._asdict() for problem in problems]),
        processing_class=character_tokenizer(),
        callbacks=callbacks,
        optimizers=(optimizer, None),
        rollout_func=rollout_func,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def verifier_reward() -> Callable:
    task = Addition()

    def verify(completion_ids, answer, **_) -> list[float]:
        return [task.verify(task.decode(ids), truth) for ids, truth in zip(completion_ids, answer)]

    return verify
