"""A causal language model of Hugging Face as a policy: sampled with its own cache, scored and trained like a TinyGPT.

`sample_groups`, `token_log_probs`, `grpo_update`, `train` and `greedy_accuracy` take a `CausalLM` where they take a TinyGPT.
Left out: engines that only sample, such as vLLM; models that are split over several devices.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from grpo_core.rollout import check_finite, extend, filling, is_eos, parts, positions


class CausalLM(nn.Module):
    """A policy around a causal language model.

    Positions count real tokens only, also behind left padding. No pad token is needed: padding is filled with an EOS, and
    masks tell the two apart. Old and new log-probs must come from the same function, so all dropout is set to 0.

    Args:
        model: what `AutoModelForCausalLM.from_pretrained` gives, or `add_lora` makes of it. It is trained in place.
        bf16: compute in bfloat16, as on GPUs; weights stay in float32, and so does the log-softmax.
        gradient_checkpointing: keep the activations of layer borders only, and compute the others again on the way back.
        rows_at_once: completions sampled at a time; the cache of so many must fit into memory.
        leash: whether `reference` gives the start policy. Without it, no second copy is held.
    """

    def __init__(
        self,
        model: nn.Module,
        bf16: bool = False,
        gradient_checkpointing: bool = False,
        rows_at_once: int = 64,
        leash: bool = True,
    ):
        super().__init__()
        self.model = without_dropout(model)
        self.bf16, self.rows_at_once, self.leash = bf16, rows_at_once, leash
        self.max_length = getattr(model.config, "max_position_embeddings", math.inf)
        if gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train(gradient_checkpointing)  # Hugging Face checkpoints in train mode only.

    def train(self, mode: bool = True):
        """The model keeps its mode: without dropout, nothing but gradient checkpointing depends on it."""
        self.training = mode
        return self

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        last: int = 0,
    ) -> Tensor:
        """Logits of the token that follows each token, as of a TinyGPT.

        Args:
            token_ids: (N, T), the new tokens.
            attention_mask: (N, cached + T), false at padding.
            position_ids: (N, T).
            cache: what was read before; it is extended.
            last: only the logits of so many last tokens; 0 for all. With 150,000 words in the vocabulary it matters.

        Returns:
            (N, T or last, vocabulary)
        """
        with self._precision(token_ids.device):
            return self.model(
                input_ids=token_ids,
                attention_mask=None if attention_mask is None else attention_mask.long(),
                position_ids=position_ids,
                cache=cache,
                use_cache=cache is not None,
                logits_to_keep=last,
            ).logits

    def _precision(self, device: torch.device):
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)

    def completion_logits(self, prompt_ids: Tensor, completion_ids: Tensor, prompt_mask: Tensor | None) -> Tensor:
        """(N, T, vocabulary) logits that predict the completion; `token_log_probs` asks for them."""
        mask = extend(real_tokens(prompt_ids, prompt_mask), completion_ids.shape[1])
        token_ids = torch.cat([prompt_ids, completion_ids], dim=1)
        return self(token_ids, mask, positions(mask), last=completion_ids.shape[1] + 1)[:, :-1]

    @torch.no_grad()
    def complete(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor | None,
        group_size: int,
        max_new_tokens: int,
        eos_id: int | Sequence[int],
        choose: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Complete each prompt `group_size` times, `rows_at_once` rows at a time; `rollout.generate` asks for it.

        `choose` turns (rows, vocabulary) logits into tokens. Returns (N, T), with T as long as the longest completion.
        """
        mask = real_tokens(prompt_ids, prompt_mask)
        with self._precision(prompt_ids.device):  # Around all steps, so that weights are cast once, not for each token.
            chunks = [
                self._complete(prompt_ids[rows], mask[rows], group_size, max_new_tokens, eos_id, choose)
                for rows in parts(len(prompt_ids), max(1, self.rows_at_once // group_size))
            ]
        longest = max(chunk.shape[1] for chunk in chunks)
        return torch.cat([F.pad(chunk, (0, longest - chunk.shape[1]), value=filling(eos_id)) for chunk in chunks])

    def _complete(self, prompt_ids, mask, group_size, max_new_tokens, eos_id, choose) -> Tensor:
        """Read the prompts once, repeat their cache for the group, then add a token at a time to the rows that still go on."""
        cache = DynamicCache(config=self.model.config)
        logits = self(prompt_ids, mask, positions(mask), cache, last=1)[:, -1].repeat_interleave(group_size, dim=0)
        cache.batch_repeat_interleave(group_size)
        mask = mask.repeat_interleave(group_size, dim=0)
        completion = prompt_ids.new_full((len(mask), max_new_tokens), filling(eos_id))
        going = torch.arange(len(mask), device=mask.device)
        for length in range(1, max_new_tokens + 1):
            check_finite(logits)
            tokens = choose(logits)
            completion[going, length - 1] = tokens
            rows = (~is_eos(tokens, eos_id)).nonzero().squeeze(1)
            if len(rows) == 0 or length == max_new_tokens:
                return completion[:, :length]
            if len(rows) < len(going):
                cache.batch_select_indices(rows)
                going, mask, tokens = going[rows], mask[rows], tokens[rows]
            mask = extend(mask, 1)
            logits = self(tokens.unsqueeze(1), mask, positions(mask)[:, -1:], cache, last=1)[:, -1]

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "disable_adapter")

    def reference(self) -> "Reference | None":
        """The start policy, frozen: with LoRA the same model with its adapter off, else a copy. `train` asks for it."""
        if not self.leash:
            return None
        return Reference(self if self.has_adapter else copy.deepcopy(self).requires_grad_(False))

    def state_dict(self, *args, **kwargs) -> dict[str, Tensor]:
        """The weights; with LoRA only those of the adapter, since the others never change."""
        weights = super().state_dict(*args, **kwargs)
        return {name: weight for name, weight in weights.items() if "lora_" in name} if self.has_adapter else weights

    def load_state_dict(self, weights: dict[str, Tensor], *args, **kwargs):
        if weights.keys() != self.state_dict().keys():
            raise RuntimeError("these weights are of another model, or of another kind of training (LoRA or all weights)")
        return super().load_state_dict(weights, strict=False)


class Reference:
    """The frozen start policy of a `CausalLM`. A checkpoint holds its fingerprint, not its weights.

    Args:
        policy: a copy of the start policy, or the policy itself if it has an adapter, which is then switched off.
    """

    def __init__(self, policy: CausalLM):
        self.policy = policy
        frozen = [weight.detach() for name, weight in policy.model.named_parameters() if "lora_" not in name]
        self.fingerprint = sum(torch.linalg.vector_norm(weight, 1, dtype=torch.float64).item() for weight in frozen)

    def completion_logits(self, *rows: Tensor | None) -> Tensor:
        with self.policy.model.disable_adapter() if self.policy.has_adapter else nullcontext():
            return self.policy.completion_logits(*rows)

    def state_dict(self) -> dict[str, float]:
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if not math.isclose(state["fingerprint"], self.fingerprint, rel_tol=1e-9):
            raise ValueError("the start policy is another one")

    def __deepcopy__(self, memo) -> "Reference":
        return self  # Nothing in it changes.


def real_tokens(prompt_ids: Tensor, prompt_mask: Tensor | None) -> Tensor:
    return torch.ones_like(prompt_ids, dtype=torch.bool) if prompt_mask is None else prompt_mask.bool()


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every rate of dropout in a model to 0, those of modules and those that attention reads as numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and add a low-rank adapter to each of its linear layers: W + B·A, with B·A = 0 at the start.

    Args:
        model: changed in place.
        rank: of B·A. The adapter is scaled by 2, as alpha = 2 · rank does.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """
    from peft import LoraConfig, get_peft_model

    if rank < 1:
        raise ValueError(f"the rank of the adapter must be at least 1, got {rank}")
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def eos_ids(model: nn.Module, tokenizer) -> tuple[int, ...]:
    """All tokens that end a completion: the tokenizer's EOS and those of the model's generation settings.

    Raises:
        ValueError: there is none; completions would never end.
    """
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [tokenizer.eos_token_id, *(more if isinstance(more, list | tuple) else [more])]
    ids = tuple(dict.fromkeys(i for i in found if i is not None))
    if not ids:
        raise ValueError("neither the tokenizer nor the model names an EOS token: set tokenizer.eos_token")
    return ids


def load(name: str, bf16: bool = False, lora_rank: int = 0, **settings) -> tuple[CausalLM, object]:
    """A policy and its tokenizer from the Hugging Face hub, or from a folder that `save_pretrained` wrote.

    Args:
        name: "Qwen/Qwen2.5-0.5B-Instruct", or a folder.
        bf16: see `CausalLM`. With LoRA the frozen weights are held in bfloat16, too.
        lora_rank: train an adapter of this rank; 0 trains all weights.
        settings: of `CausalLM`.

    Raises:
        ValueError: there is no such folder, and no such model can be had from the hub.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16 if bf16 and lora_rank else torch.float32)
    except (OSError, ValueError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"no model can be loaded from {name!r}: it is no folder with a model and its tokenizer, and the Hugging Face hub "
            f"does not have it or cannot be reached ({cause}). For a gated model: `hf auth login`. With a network elsewhere, "
            f"`hf download {name} --local-dir FOLDER` there, copy the folder here and give its path. Without any, "
            "`python -m grpo_core tiny-llama` makes a small model"
        ) from error
    return CausalLM(add_lora(model, lora_rank) if lora_rank else model, bf16=bf16, **settings), tokenizer
