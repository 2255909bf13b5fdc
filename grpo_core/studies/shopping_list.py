"""The shopping list: which networks, how much memory, arithmetic and time one iteration of each method needs, measured.

Is it true that dropping the critic halves memory and compute? A `Meter` watches small runs here; `at_scale` computes the same
for 7 billion parameters. The answer is written in words, with the numbers in place.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from grpo_core import rollout
from grpo_core.report import BLUE, GRAY, ORANGE, write_figure, write_text
from grpo_core.rivals import ppo
from grpo_core.rivals.at_scale import RECIPES, at_scale, totals, without_critic
from grpo_core.rivals.budget import Budget
from grpo_core.rivals.dpo import train_dpo
from grpo_core.rivals.grpo import train_grpo
from grpo_core.rivals.imitation import ExpertIterationConfig, train_expert_iteration, train_supervised
from grpo_core.rivals.meter import KINDS, NETWORKS, PARTS, Meter, no_evaluation
from grpo_core.rivals.reinforce import ReinforceConfig, train_reinforce
from grpo_core.studies.runs import write_settings
from grpo_core.task import Addition
from grpo_core.warm_start import warm_start

FOLDER, SEEDS = Path("outputs/shopping_list"), range(5)
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
    return Bill(method, *meters, result.spent["answers"])


def clock(task, seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """Median CPU seconds of one iteration of each method, and the share of them that sampling takes.

    The methods take turns, so that a machine that slows down slows all of them. Only ratios can be compared with other runs.
    """
    rows = []
    for seed in seeds:
        budget = replace(BUDGET, seed=seed)
        for method, run in METHODS.items():
            whole, sampling = [], []
            timed_generate = partial(timed, sampling, rollout.generate)
            with no_evaluation(), mock.patch.object(rollout, "generate", timed_generate):
                timed(whole, run, task, warm_start(), budget)
            share = sum(sampling) / whole[0]
            rows.append({"method": method, "seconds": whole[0] / BUDGET.iterations, "sampling_time": share})
    return pd.DataFrame(rows).groupby("method", sort=False).median()


def timed(seconds: list[float], function: Callable, *args):
    """Call a function and note how long the CPU worked on it."""
    start = time.process_time()
    result = function(*args)
    seconds.append(time.process_time() - start)
    return result


def shopping_list(task=None, seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
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
    times = clock(task, seeds)
    times["seconds_ratio"] = times["seconds"] / times.loc["GRPO", "seconds"]
    times["network"] = "total"
    return frame.merge(times.reset_index(), on=["method", "network"], how="left")


def write(folder: Path, seeds: Sequence[int] = SEEDS) -> str:
    """Write shopping_list.csv and at_scale.csv, the answer in words with both tables, shopping_list.md, and a figure."""
    here, large = shopping_list(seeds=seeds), at_scale()
    for name, frame in (("shopping_list.csv", here), ("at_scale.csv", large)):
        write_text(folder / name, frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    text = "\n\n".join([answer(here), table_here(here), table_large(large)]) + "\n"
    write_text(folder / "shopping_list.md", text)
    write_figure(folder / "shopping_list.png", scale_figure(large))
    modules = sorted({getattr(run, "func", run).__module__ for run in METHODS.values()})
    settings = {"seeds": list(seeds), "budget": asdict(BUDGET)}
    write_settings(folder, settings, *modules, "grpo_core.rivals.at_scale", "grpo_core.rivals.meter")
    return text


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
