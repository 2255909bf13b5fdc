"""The shopping list: which networks, how much memory, arithmetic and time one iteration of each method needs, measured.

A `Meter` watches a training run from outside; the methods do not know of it. `at_scale` computes the same for 7 billion
parameters. Left out: activations at that scale, which one can trade for time; traffic between machines; the resident memory
of the process, which at this size is the libraries' own workspace.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from grpo_core import evaluate, rollout
from grpo_core.policy import TinyGPT
from grpo_core.report import BLUE, GRAY, ORANGE, write_figure, write_text
from grpo_core.rivals import ppo
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.dpo import train_dpo
from grpo_core.rivals.grpo import train_grpo
from grpo_core.rivals.imitation import ExpertIterationConfig, train_expert_iteration, train_supervised
from grpo_core.rivals.reinforce import ReinforceConfig, train_reinforce
from grpo_core.rivals.reward_model import RewardModel
from grpo_core.task import Addition
from grpo_core.warm_start import warm_start

BUDGET = Budget(iterations=4, gradient_steps=8)  # The default's iterations, but four: what is done once is shared by these.


METHODS: dict[str, Callable] = {
    "GRPO": train_grpo,
    "PPO, verifier": ppo.train_ppo,
    "PPO, reward model": ppo.train_ppo_with_reward_model,
    "DPO": train_dpo,
    "REINFORCE": partial(train_reinforce, config=ReinforceConfig("none")),
    "RLOO": partial(train_reinforce, config=ReinforceConfig("leave_one_out")),
    "expert iteration": partial(train_expert_iteration, config=ExpertIterationConfig(rounds=1)),
    "supervised": train_supervised,
}
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


@dataclass(frozen=True)
class Bill:
    """What a method needs.

    Attributes:
        method: its name in `METHODS`.
        run: a run of `BUDGET` as it is, where equal rows are read once.
        plain: the same run, where each completion is read as often as it was sampled.
        answers: true answers seen.
    """

    method: str
    run: Meter
    plain: Meter
    answers: int

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each network, and their total. Bytes are peaks; everything else is for one iteration.

        The peaks of the total are those of the run, not the sums: not all is held at the same time.
        """
        names = [name for name in NETWORKS if name in self.run.uses]
        networks = pd.DataFrame([self._row(name) for name in names], index=pd.Index(names, name="network"))
        total = networks.sum()
        total["state"], total["activations"] = self.run.state, self.run.activations
        total["completions"], total["answers"] = self.run.completions / BUDGET.iterations, self.answers / BUDGET.iterations
        frame = pd.concat([networks, total.to_frame("total").T.rename_axis("network")]).reset_index()
        frame.insert(0, "method", self.method)
        return frame

    def _row(self, name: str) -> dict[str, float]:
        run, plain = self.run.uses[name], self.plain.uses[name]
        row = {kind: getattr(run, kind) for kind in ("parameters", *KINDS)}
        row |= {"state": sum(row[kind] for kind in KINDS), "activations": run.activations}
        row |= {f"{part}_calls": plain.calls[part] / BUDGET.iterations for part in (*PARTS, "backward")}
        row |= {f"{part}_flops": run.flops[part] / BUDGET.iterations for part in PARTS}
        row |= {f"{part}_plain": plain.plain_flops(part) / BUDGET.iterations for part in PARTS}
        return row


def measure(task, method: str) -> Bill:
    """Run a method on `BUDGET` from the start policy, twice: as it is, and reading each completion as often as sampled.

    Raises:
        ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    meters = []
    for shared in (True, False):
        policy = warm_start()
        with no_evaluation(), Meter(policy, shared) as meter:
            result = METHODS[method](task, policy, BUDGET)
        meters.append(meter)
    return Bill(method, *meters, getattr(result, "spent", {}).get("answers", 0))


def clock(task, repeats: int = 5) -> pd.DataFrame:
    """Median CPU seconds of one iteration of each method, and the share of them that sampling takes.

    The methods take turns, so that a machine that slows down slows all of them. Only ratios can be compared with other runs.
    """
    rows = []
    for _ in range(repeats):
        for method, run in METHODS.items():
            whole, sampling = [], []
            timed_generate = partial(timed, sampling, rollout.generate)
            with no_evaluation(), mock.patch.object(rollout, "generate", timed_generate):
                timed(whole, run, task, warm_start(), BUDGET)
            share = sum(sampling) / whole[0]
            rows.append({"method": method, "seconds": whole[0] / BUDGET.iterations, "sampling_time": share})
    return pd.DataFrame(rows).groupby("method", sort=False).median()


def timed(seconds: list[float], function: Callable, *args):
    """Call a function and note how long the CPU worked on it."""
    start = time.process_time()
    result = function(*args)
    seconds.append(time.process_time() - start)
    return result


def shopping_list(task=None) -> pd.DataFrame:
    """What each method needs for one iteration of the addition task: a row for each network, and the total.

    Columns:
        parameters; weights, gradients, optimizer, state (their sum), activations: bytes at their peak.
        sampling_calls, scoring_calls, updating_calls, backward_calls: of the network, if no row is read for another.
        sampling_flops, scoring_flops, updating_flops: counted, as the code runs.
        sampling_plain, scoring_plain, updating_plain: 2 · parameters · tokens, and 4 on the way back, no row left out.
        completions, answers: sampled, and true answers seen.
        seconds, seconds_ratio (to GRPO), sampling_time (its share of the seconds): see `clock`.
    """
    task = Addition() if task is None else task
    frame = pd.concat([measure(task, method).frame for method in METHODS], ignore_index=True)
    times = clock(task)
    times["seconds_ratio"] = times["seconds"] / times.loc["GRPO", "seconds"]
    times["network"] = "total"
    return frame.merge(times.reset_index(), on=["method", "network"], how="left")


@dataclass(frozen=True)
class Recipe:
    """One iteration of a method in terms of reading each completion once.

    Attributes:
        trained, frozen: networks held.
        scored: networks that read each completion before the first step, without a gradient.
        sampled: completions sampled, as a share.
        used: share of the completions that a gradient step reads.
    """

    trained: tuple[str, ...] = ("policy",)
    frozen: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()
    sampled: float = 1.0
    used: float = 1.0


# Half of the completions are taken to be right: then all find a place in a pair, and expert iteration keeps half. Old log-probs
# are read once more only where a ratio needs them; the code here always does, which is why its counts are higher in places.
RECIPES = {
    "GRPO": Recipe(frozen=("reference",), scored=("policy", "reference")),
    "GRPO, beta 0": Recipe(scored=("policy",)),
    "PPO, verifier": Recipe(("policy", "critic"), ("reference",), ("policy", "reference", "critic")),
    "PPO, verifier, beta 0": Recipe(("policy", "critic"), (), ("policy", "critic")),
    "PPO, value head": Recipe(("policy", "value head"), ("reference",), ("policy", "reference", "value head")),
    "PPO, reward model": Recipe(
        ("policy", "critic"), ("reference", "reward model"), ("policy", "reference", "critic", "reward model")
    ),
    "DPO": Recipe(scored=("policy",)),
    "REINFORCE or RLOO": Recipe(),
    "expert iteration": Recipe(used=0.5),
    "supervised": Recipe(sampled=0.0),
}
BYTES = {"weights": 2, "gradients": 2, "optimizer": 12}  # bfloat16, bfloat16; float32 weights and Adam's two moments.


def at_scale(
    parameters: float = 7e9, mu: int = 2, completions: int = 384, tokens: int = 1000, width: int = 4096
) -> pd.DataFrame:
    """What each method would need with a large policy: a row for each network, and the total.

    memory   16 bytes for each trained parameter, 2 for each frozen one
    FLOPs    a pass over the completions costs 2 · parameters · completions · tokens, and twice that on the way back.
             Sampling: one pass of the policy, token by token. Scoring: one pass of each network that is asked.
             Updating: mu times forward and back of each trained network

    Args:
        parameters: of policy, reference, critic and reward model alike.
        mu: gradient steps on each rollout.
        completions: in an iteration.
        tokens: of a prompt and its completion.
        width: of the residual stream; a value head on the policy's body has width + 1 parameters.

    Returns:
        Columns: parameters; weights, gradients, optimizer, state: bytes; sampling, scoring, updating, flops: FLOPs of an
        iteration; state_ratio, flops_ratio: to the total of GRPO. The reward model's own training is not in it.

    Raises:
        ValueError: an argument is not positive.

    Source: for the bytes Rajbhandari et al. 2020 (ZeRO), section 3.1; for the FLOPs Kaplan et al. 2020, section 2.1.

    >>> total = at_scale().query("network == 'total'").set_index("method")
    >>> (total.loc[["PPO, verifier", "GRPO"], "state"] / 1e9).tolist()
    [238.0, 126.0]
    """
    if min(parameters, mu, completions, tokens, width) <= 0:
        raise ValueError("parameters, mu, completions, tokens and width must be above 0")
    rows = []
    for method, recipe in RECIPES.items():
        for name in recipe.trained + recipe.frozen:
            size = width + 1 if name == "value head" else parameters
            rows.append({"method": method, "network": name} | _scaled(recipe, name, size, mu, completions * tokens))
    frame = pd.DataFrame(rows)
    total = frame.groupby("method", sort=False).sum(numeric_only=True).assign(network="total").reset_index()
    frame = pd.concat([frame, total], ignore_index=True)
    frame = frame.sort_values("method", key=lambda column: column.map(list(RECIPES).index), kind="stable", ignore_index=True)
    grpo = total.set_index("method").loc["GRPO"]
    return frame.assign(state_ratio=frame["state"] / grpo["state"], flops_ratio=frame["flops"] / grpo["flops"])


def _scaled(recipe: Recipe, name: str, size: float, mu: int, tokens: int) -> dict[str, float]:
    """Bytes and FLOPs of one network."""
    trained, forward = name in recipe.trained, 2 * size * tokens
    row = {"parameters": size} | {kind: BYTES[kind] * size * (trained or kind == "weights") for kind in KINDS}
    flops = {
        "sampling": recipe.sampled * forward * (name == "policy"),
        "scoring": forward * (name in recipe.scored),
        "updating": mu * recipe.used * 3 * forward * trained,
    }
    return row | {"state": sum(row[kind] for kind in KINDS)} | flops | {"flops": sum(flops.values())}


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    """The total rows of `shopping_list` or `at_scale`, by method."""
    return frame[frame["network"] == "total"].drop(columns="network").set_index("method")


def write_shopping_list(folder: Path) -> None:
    """Write shopping_list.csv and at_scale.csv, the answer in words with both tables, shopping_list.md, and a figure."""
    here, large = shopping_list(), at_scale()
    for name, frame in (("shopping_list.csv", here), ("at_scale.csv", large)):
        write_text(folder / name, frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    write_text(folder / "shopping_list.md", "\n\n".join([answer(here), table_here(here), table_large(large)]) + "\n")
    write_figure(folder / "shopping_list.png", scale_figure(large))


def without_critic(mu: int = 2, sampling_time: float | None = None) -> float:
    """What GRPO costs as a share of PPO with a critic and a verifier, the networks being large.

    Args:
        mu: gradient steps on each rollout.
        sampling_time: the share of PPO's time that sampling takes; the rest goes with the FLOPs. By default FLOPs count
            alike, whatever they are for.

    >>> round(without_critic(mu=2), 4), round(without_critic(mu=2, sampling_time=0.7), 4)
    (0.5625, 0.86)
    """
    total = totals(at_scale(mu=mu))
    grpo, ppo_ = total.loc["GRPO"], total.loc["PPO, verifier"]
    if sampling_time is None:
        return float(grpo["flops"] / ppo_["flops"])
    rest = (grpo["flops"] - grpo["sampling"]) / (ppo_["flops"] - ppo_["sampling"])
    return float(sampling_time + (1 - sampling_time) * rest)


def answer(here: pd.DataFrame) -> str:
    """Is it true that dropping the critic halves memory and compute? In words; each number is computed.

    Args:
        here: a `shopping_list`.
    """
    return "# Does dropping the critic halve memory and compute?\n\n" + "\n".join([*answer_large(), *answer_here(here)])


def answer_large() -> list[str]:
    """What the formula says of 7 billion parameters."""
    large = at_scale()
    gb, flops = totals(large)["state"] / 1e9, totals(large)[["sampling", "flops"]]
    critic, reference = (large[large["network"] == name]["state"].iloc[0] / 1e9 for name in ("critic", "reference"))
    head = large[large["network"] == "value head"]["parameters"].iloc[0]
    share = flops["sampling"] / flops["flops"]
    return f"""Nearly the memory of the model state, and less of the compute. Not the sampling, nor the memory of activations.

* **What goes.** Beside a policy of 7 billion parameters a critic of the same size takes {critic:.0f} GB, 16 bytes a parameter.
  PPO with a verifier holds {gb["PPO, verifier"]:.0f} GB, GRPO {gb["GRPO"]:.0f} GB: {saved(gb)} less.
* **It is half without a leash.** The frozen reference costs {reference:.0f} GB and one pass over the completions. With beta = 0
  neither method needs it: {gb["PPO, verifier, beta 0"]:.0f} GB against {gb["GRPO, beta 0"]:.0f} GB.
* **It is nothing if the critic is a value head** on the policy's own body, of {head:,.0f} parameters. Such a PPO holds
  {gb["PPO, value head"]:.0f} GB, as GRPO does, and its arithmetic is practically the same.
* **Compute.** With 1, 2 and 4 gradient steps on a rollout, GRPO does {percent(without_critic(1))}, {percent(without_critic(2))}
  and {percent(without_critic(4))} of PPO's FLOPs. Half is the limit of many steps, for what the reference and the sampling take
  stays.
* **Sampling** is the same work for both: {percent(share["GRPO"])} of GRPO's FLOPs and {percent(share["PPO, verifier"])} of
  PPO's at two steps. Its share of the time can be much larger, for tokens come one after another. If it takes {percent(0.7)}
  of PPO's time, an iteration of GRPO takes {percent(without_critic(sampling_time=0.7))} as long.""".splitlines()


def answer_here(here: pd.DataFrame) -> list[str]:
    """What was measured."""
    ours = totals(here).loc[["GRPO", "PPO, verifier"]]
    state, activations = ours["state"] / 1e6, ours["activations"] / 1e6
    run, plain = (ours[[f"{part}_{kind}" for part in PARTS]].sum(axis=1) for kind in ("flops", "plain"))
    ratios = [percent(x["GRPO"] / x["PPO, verifier"]) for x in (run, plain, ours["seconds"])]
    return f"""* **Activations.** Policy and critic are trained one after the other, so only one of them keeps activations at a
  time. Here the peak is {activations["GRPO"]:.1f} MB with GRPO and {activations["PPO, verifier"]:.1f} MB with PPO.
* **Measured here**, in float32, where a frozen parameter takes 4 bytes: {state["PPO, verifier"]:.2f} MB of model state with
  PPO, {state["GRPO"]:.2f} MB with GRPO, {saved(state)} less. GRPO does {ratios[0]} of PPO's FLOPs as the code runs, which reads
  equal rows once, and {ratios[1]} if each row is read. An iteration takes {ratios[2]} of the CPU time, on one machine at one
  time; of PPO's time, sampling takes {percent(ours.loc["PPO, verifier", "sampling_time"])}.""".splitlines()


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def saved(cost: pd.Series) -> str:
    return percent(1 - cost["GRPO"] / cost["PPO, verifier"])


def table_here(here: pd.DataFrame) -> str:
    """The measured list as a Markdown table."""
    lines = []
    for method, row in totals(here).iterrows():
        run, plain = (sum(row[f"{part}_{kind}"] for part in PARTS) / 1e9 for kind in ("flops", "plain"))
        cells = method, held(here, method), f"{row['parameters']:,.0f}", f"{row['state'] / 1e6:.2f}"
        cells += f"{row['activations'] / 1e6:.1f}", f"{row['completions']:.0f}", f"{row['answers']:.0f}", f"{run:.2f}"
        lines.append((*cells, f"{plain:.2f}", f"{row['seconds_ratio']:.2f}", percent(row["sampling_time"])))
    columns = "method", "networks", "parameters", "model state, MB", "activations, MB", "completions", "true answers"
    columns += "GFLOPs as run", "GFLOPs, each row read", "time, to GRPO's", "of it sampling"
    return f"## Here: one iteration of the addition task\n\n{markdown(columns, lines)}\n\n{NOTE_HERE}"


def table_large(large: pd.DataFrame) -> str:
    """The computed list as a Markdown table."""
    lines = [
        (method, held(large, method), f"{row['state'] / 1e9:.0f}", f"{row['state_ratio']:.2f}", f"{row['flops'] / 1e15:.1f}")
        + (f"{row['flops_ratio']:.2f}", percent(row["sampling"] / row["flops"]))
        for method, row in totals(large).iterrows()
    ]
    columns = "method", "networks", "model state, GB", "to GRPO's", "PFLOPs an iteration", "to GRPO's", "of it sampling"
    return f"## Computed: a policy of 7 billion parameters\n\n{markdown(columns, lines)}\n\n{NOTE_LARGE}"


NOTE_HERE = f"""An average over {BUDGET.iterations} iterations of {BUDGET.inner_epochs} gradient steps each, without evaluation.
What is done once is shared by these iterations. DPO reads the reference's log-probs once, before the first step, and so
holds no second network; the reward model is trained before PPO starts, on half of the completions. Old log-probs are read for
every method, though only those with a ratio need them."""
NOTE_LARGE = """Two gradient steps on 384 completions of 1,000 tokens, prompts included. A trained parameter takes 16 bytes
(bfloat16 weight and gradient; float32 weight and two moments of Adam), a frozen one 2. A pass costs 2 FLOPs for each parameter
and token, and 4 more on the way back. Half of the completions are right: expert iteration learns from these, DPO from all,
in pairs. Left out are activations, the cache of keys and values, and the training of the reward model."""


def held(frame: pd.DataFrame, method: str) -> str:
    return ", ".join(name for name in frame[frame["method"] == method]["network"] if name != "total")


def markdown(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, ("---",) * len(columns), *lines))


COLORS = {"policy": BLUE, "reference": GRAY, "critic": ORANGE, "reward model": "#e69f00", "value head": "#cc79a7"}
HATCHES = ("", "///", "...")


def scale_figure(large: pd.DataFrame) -> Figure:
    """Memory by network and kind, arithmetic by network and part: a bar for each method."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, large, KINDS, 1e9)
    _bars(right, large, PARTS, large.query("method == 'GRPO' and network == 'total'")["flops"].item())
    left.set(xlabel="model state, GB", title="memory")
    right.set(xlabel="FLOPs of an iteration, GRPO = 1", title="arithmetic, two gradient steps on a rollout")
    left.invert_yaxis()
    names = [name for name in COLORS if name != "value head"]  # Too thin to be seen.
    figure.legend([Patch(color=COLORS[name]) for name in names], names, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _bars(axes, large: pd.DataFrame, columns: tuple[str, ...], unit: float) -> None:
    """Stacked bars: the color is the network, the hatch is the column."""
    start = dict.fromkeys(RECIPES, 0.0)
    for row in large[large["network"] != "total"].to_dict("records"):
        method, color = row["method"], COLORS[row["network"]]
        for column, hatch in zip(columns, HATCHES):
            width = row[column] / unit
            axes.barh(method, width, left=start[method], height=0.7, color=color, hatch=hatch, edgecolor="white")
            start[method] += width
    axes.legend([Patch(facecolor=GRAY, hatch=hatch, edgecolor="white") for hatch in HATCHES], columns, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
