"""A meter: what a training run needs, network by network, watched from outside. The methods do not know of it.

It counts real tensors, calls and matrix products, and changes no number of the run. Left out: the resident memory of the
process, which at this size is the libraries' own workspace.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from grpo_core import evaluate, rollout
from grpo_core.policy import TinyGPT
from grpo_core.rivals import ppo
from grpo_core.rivals.reward_model import RewardModel

NETWORKS = ("policy", "reference", "critic", "reward model", "value head")
KINDS = ("weights", "gradients", "optimizer")
PARTS = ("sampling", "scoring", "updating")
ATTENTION = {  # What a CPU calls attention; torch's counter knows it under other names only. The formulas are the same.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
        *shapes[:4]
    ),
}


@dataclass
class Use:
    """What one network cost during a run.

    Attributes:
        parameters: how many numbers it has.
        weights, gradients, optimizer, activations: bytes, each at its peak. Activations are what autograd kept for backward.
        calls: of the network, by part: sampling, scoring (neither has a gradient), updating; backward counts the gradients
            that came back.
        tokens: what these calls read.
        flops: multiplications and additions in matrix products, by part. Updating is forward and backward.
    """

    parameters: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    calls: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)
    flops: Counter = field(default_factory=Counter)

    def plain_flops(self, part: str) -> int:
        """The rule of thumb: 2 FLOPs for each parameter and token on the way forward, 4 on the way back."""
        back = self.tokens["backward"] if part == "updating" else 0
        return self.parameters * (2 * self.tokens[part] + 4 * back)


class Meter:
    """Watches what happens to every TinyGPT while it is entered. A call that fails leaves it in no state to go on.

    Arithmetic belongs to the network of the last event: it was called, it returned, or a gradient arrived at what it had
    returned. Autograd works backward through one call after the other, so the parts do not mix.

    Args:
        policy: the network to be called policy.
        shared: false reads each completion as often as it was sampled, where the code would read equal ones once.

    Attributes:
        uses: what each network cost, by its name.
        state: bytes of weights, gradients and optimizer states together, at the peak.
        activations: bytes that autograd kept for backward, weights apart, at the peak. Each storage counts once.
        completions: sampled.
    """

    def __init__(self, policy: TinyGPT, shared: bool = True):
        self.uses: dict[str, Use] = {}
        self.state = self.activations = self.completions = 0
        self._shared, self._networks = shared, weakref.WeakKeyDictionary()
        self._weights, self._optimizers = set(), weakref.WeakSet()
        self._kept, self._owner, self._alive = Counter(), {}, Counter()  # Tensors of a storage, its network; bytes of that.
        self._sampling, self._place, self._counted = False, None, 0
        self._enter(policy, "policy")

    def __enter__(self) -> "Meter":
        self._stack = ExitStack()
        self._flops = self._stack.enter_context(FlopCounterMode(display=False, custom_mapping=ATTENTION))
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor))
        self._stack.enter_context(mock.patch.object(rollout, "generate", partial(self._generate, rollout.generate)))
        if not self._shared:
            for module in (rollout, ppo):
                self._stack.enter_context(mock.patch.object(module, "shared_logits", rollout.completion_logits))
        for hook in (
            register_module_forward_pre_hook(self._called),
            register_module_forward_hook(self._returned),
            register_optimizer_step_post_hook(self._stepped),
        ):
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *_) -> None:
        self._move(None)
        self._stack.close()

    def _enter(self, network: TinyGPT, name: str) -> None:
        parameters = list(network.parameters())
        self._weights |= {p.untyped_storage().data_ptr() for p in parameters}
        self._networks[network] = name
        self.uses.setdefault(name, Use(sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)))

    def _called(self, module: nn.Module, _) -> None:
        if isinstance(module, RewardModel):
            self._enter(module.network, "reward model")
        elif isinstance(module, TinyGPT):
            if module not in self._networks:
                self._enter(module, "critic" if module.head.out_features == 1 else "reference")
            self._move((self._networks[module], "scoring"))

    def _returned(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if not isinstance(module, TinyGPT):
            return
        name, tokens = self._networks[module], inputs[0].numel()
        part = "sampling" if self._sampling else "updating" if output.requires_grad else "scoring"
        self._place = name, part  # Only now it is known what the call was for.
        self._count(part, tokens)
        if output.requires_grad:
            output.register_hook(lambda _: (self._move((name, "updating")), self._count("backward", tokens))[-1])

    def _count(self, part: str, tokens: int) -> None:
        use = self.uses[self._place[0]]
        use.calls[part] += 1
        use.tokens[part] += tokens

    def _move(self, place: tuple[str, str] | None) -> None:
        """Write the arithmetic since the last event to where that was, and go to `place`."""
        total = self._flops.get_total_flops()
        if self._place is not None:
            name, part = self._place
            self.uses[name].flops[part] += total - self._counted
        self._place, self._counted = place, total

    def _generate(self, generate: Callable, policy, prompt_ids: Tensor, prompt_mask, group_size: int, *rest) -> Tensor:
        if not self._shared:  # As groups of one, no two completions have a beginning in common.
            prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
            prompt_mask = None if prompt_mask is None else prompt_mask.repeat_interleave(group_size, dim=0)
            group_size = 1
        self._sampling = True
        ids = generate(policy, prompt_ids, prompt_mask, group_size, *rest)
        self._sampling = False
        self.completions += len(ids)
        return ids

    def _stepped(self, optimizer: Optimizer, *_) -> None:
        """A step was taken, on whatever network: what is held at this moment?"""
        self._optimizers.add(optimizer)
        states = {p: state_bytes(state) for each in self._optimizers for p, state in each.state.items()}
        held = 0
        for network, name in self._networks.items():
            use, parameters = self.uses[name], list(network.parameters())
            gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
            moments = sum(states.get(p, 0) for p in parameters)
            use.gradients, use.optimizer = max(use.gradients, gradients), max(use.optimizer, moments)
            held += use.weights + gradients + moments
        self.state = max(self.state, held)

    def _keep(self, tensor: Tensor) -> "Kept":
        """Autograd keeps a tensor for backward."""
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._weights:
            return Kept(tensor, lambda: None)
        if self._kept[key] == 0:
            self._owner[key] = name = "policy" if self._place is None else self._place[0]
            self._alive[name] += size
            self.uses[name].activations = max(self.uses[name].activations, self._alive[name])
            self.activations = max(self.activations, self._alive.total())
        self._kept[key] += 1
        return Kept(tensor, partial(self._release, key, size))

    def _release(self, key: int, size: int) -> None:
        self._kept[key] -= 1
        if self._kept[key] == 0:
            self._alive[self._owner.pop(key)] -= size


class Kept:
    """Holds a tensor as long as autograd needs it."""

    def __init__(self, tensor: Tensor, when_released: Callable[[], None]):
        self.tensor, self.when_released = tensor.detach(), when_released  # With its graph it would keep itself alive.

    def __del__(self):
        self.when_released()


def state_bytes(state: dict) -> int:
    """Bytes of an optimizer's state of one parameter. AdamW keeps two moments and a count of steps."""
    return sum(x.nbytes for x in state.values() if isinstance(x, Tensor))


@contextmanager
def no_evaluation() -> Iterator[None]:
    """Greedy accuracy is measured for the reader, not for the method. In here it costs nothing, and every answer is wrong."""
    with mock.patch.object(evaluate, "greedy_completions", lambda policy, task, problems: [""] * len(problems)):
        yield
