"""What each method would need with a policy of 7 billion parameters: bytes and FLOPs, by formula.

Left out: activations, which one can trade for time; the cache of keys and values; traffic between machines.
"""

from dataclasses import dataclass

import pandas as pd

from grpo_core.rivals.meter import KINDS


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
