"""LeashExplorer: move a policy away from the reference and watch every estimate beside the exact KL.

The exact KL of a token is a sum over the whole vocabulary, 13 characters here. Everything is measured once, on a small
fixed set of problems, so that a move only looks it up.
"""

import copy
from dataclasses import dataclass

import ipywidgets as W
import torch
from torch import Tensor

from grpo_core.evaluate import greedy_accuracy
from grpo_core.kl import kl_estimate
from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, button, figure_html, table_html
from grpo_core.rollout import Rollout, sample_groups

KINDS = ("k1", "k2", "k3")
STEPS = [step / 5 for step in range(11)]  # 0 is the reference, 1 the trained policy, 2 twice as far in the same direction.
TEMPERATURE = 0.7
OWN, STALE = "the policy itself", "the reference (stale)"
CURVES = {"exact": ("black", "-", "o"), "k1": (BLUE, "--", "s"), "k2": (GRAY, ":", "^"), "k3": (ORANGE, "-", "v")}


@torch.no_grad()
def vocabulary_log_probs(policy, rollout: Rollout, temperature: float | None = None) -> Tensor:
    """(N, T, vocabulary): log-probs of *every* token at each place of the completions, not only of the sampled one."""
    token_ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    logits = policy(token_ids)[:, rollout.prompt_ids.shape[1] - 1 : -1]
    return (logits / (temperature or rollout.temperature)).log_softmax(dim=-1)


def interpolate(start, trained, share: float):
    """A policy whose weights lie `share` of the way from one policy to another; beyond 1 it goes on in the same direction."""
    policy = copy.deepcopy(start)
    with torch.no_grad():
        for weight, towards in zip(policy.parameters(), trained.parameters()):
            weight.lerp_(towards, share)
    return policy


@dataclass(frozen=True)
class Distance:
    """How far the policy is from the reference, token by token.

    Attributes:
        exact: (N, T), KL(policy ‖ reference) of the next token, over the whole vocabulary.
        log_probs, ref_log_probs: (N, T), of the sampled tokens.
        mask: (N, T), the tokens that count.
    """

    exact: Tensor
    log_probs: Tensor
    ref_log_probs: Tensor
    mask: Tensor

    @classmethod
    def measure(cls, policy, reference, rollout: Rollout) -> "Distance":
        log_p, log_ref = vocabulary_log_probs(policy, rollout), vocabulary_log_probs(reference, rollout)
        exact = (log_p.exp() * (log_p - log_ref)).sum(dim=-1)
        sampled = [x.gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1) for x in (log_p, log_ref)]
        return cls(exact, *sampled, rollout.completion_mask)

    def tokens(self, rows: slice = slice(None)) -> dict[str, Tensor]:
        """The exact KL and each estimate, for each token of some completions."""
        mask = self.mask[rows]
        estimates = {kind: kl_estimate(self.log_probs[rows], self.ref_log_probs[rows], kind)[mask] for kind in KINDS}
        return {"exact": self.exact[rows][mask]} | estimates


class LeashExplorer(Panel):
    """Slide from the start policy to the trained one and beyond.

    Args:
        start: the reference.
        trained: a policy that was trained from it.
        task: its validation problems are used.
        prompts: how many of them; two completions are sampled for each.
    """

    def __init__(self, start, trained, task, prompts: int = 128):
        problems = task.validation[:prompts]
        self.rows, self.first = 2 * prompts, 0
        self.distances, self.accuracy = {}, []
        stale = sample_groups(start, task, problems, 2, TEMPERATURE, generator=_generator())
        for share in STEPS:
            policy = interpolate(start, trained, share)
            own = sample_groups(policy, task, problems, 2, TEMPERATURE, generator=_generator())
            self.accuracy.append(float(greedy_accuracy(policy, task, problems)))
            for source, rollout in ((OWN, own), (STALE, stale)):
                self.distances.setdefault(source, []).append(Distance.measure(policy, start, rollout))
        self.step = W.IntSlider(value=5, min=0, max=len(STEPS) - 1, description="distance", readout=False)
        self.source = W.Dropdown(options=[OWN, STALE], description="sampled by")
        self.size = W.Dropdown(options=[("all", self.rows), ("8", 8), ("32", 32)], description="completions")
        self.others = button("other completions", self.take_others, "estimate from other samples")
        for control in (self.step, self.source):
            control.observe(self.refresh, "value")
        self.size.observe(self._restart, "value")
        super().__init__([[self.step, self.source], [self.size, self.others]], height=510)

    def _restart(self, _) -> None:
        self.first = 0
        self.refresh()

    def take_others(self) -> None:
        """Move on to the next completions of the fixed set; after the last come the first again."""
        self.first = (self.first + self.size.value) % self.rows
        self.refresh()

    def means(self, step: int) -> dict[str, float]:
        """Mean per token of the exact KL and of each estimate, on the chosen completions."""
        return {name: values.mean().item() for name, values in self._tokens(step).items()}

    def _tokens(self, step: int) -> dict[str, Tensor]:
        rows = slice(self.first, self.first + self.size.value)
        return self.distances[self.source.value][step].tokens(rows)

    def view(self) -> str:
        step = self.step.value
        return self._story(step) + self._table(step) + self._picture(step)

    def static(self) -> str:
        names = ["exact", *KINDS]
        rows = [
            [f"{share:g}", f"{accuracy:.2f}", *(_number(self.means(step)[name]) for name in names)]
            for step, (share, accuracy) in enumerate(zip(STEPS, self.accuracy))
        ]
        return table_html(["distance", "accuracy", *names], rows) + self._picture(self.step.value)

    def _story(self, step: int) -> str:
        exact = self.means(step)["exact"]
        return (
            f"<p>Weights {STEPS[step]:g} of the way from the start policy (0) to the trained one (1). Greedy accuracy "
            f"{self.accuracy[step]:.2f} on these {self.rows // 2} problems. Exact KL(policy ‖ reference) at the tokens of the "
            f"table: <b>{_number(exact)}</b> nats per token.</p>"
        )

    def _table(self, step: int) -> str:
        tokens = self._tokens(step)
        exact, rows = tokens["exact"].mean().item(), []
        for kind in KINDS:
            values = tokens[kind]
            error = (values.std() / len(values) ** 0.5).item()
            below = f"{(values < 0).float().mean().item():.0%}"
            largest = _number(values.max().item(), 1)
            rows.append(
                [
                    kind,
                    _number(values.mean().item()),
                    _number(exact),
                    f"±{_number(error)}",
                    _number(values.std().item(), 2),
                    below,
                    largest,
                ]
            )
        head = ["", f"mean of {len(tokens['exact'])} tokens", "exact", "standard error", "std", "below 0", "largest"]
        return table_html(head, rows)

    def _picture(self, step: int) -> str:
        means = [self.means(i) for i in range(len(STEPS))]

        def draw(figure):
            axes = figure.add_subplot()
            for name, (color, line, marker) in CURVES.items():
                curve = [mean[name] for mean in means]
                axes.plot(STEPS, curve, color=color, linestyle=line, label=name)
                axes.plot(STEPS[step], curve[step], color=color, marker=marker, markersize=8)
            axes.axvline(STEPS[step], color="black", linewidth=0.6)
            axes.set(xlabel="distance from the start policy", ylabel="nats per token", ylim=_limits(means))
            axes.legend(frameon=False, ncols=4, loc="upper left")
            axes.spines[["top", "right"]].set_visible(False)

        named = ", ".join(f"{name} {value:.3f}" for name, value in means[step].items())
        return figure_html(draw, f"KL against distance; at distance {STEPS[step]:g}: {named}", size=(6.4, 3.0))


def _limits(means: list[dict[str, float]]) -> tuple[float, float]:
    """Room for the exact curve and what lies near it; an estimate that is far off leaves the picture."""
    top = 2 * max(mean["exact"] for mean in means) + 0.1
    return min(-0.05 * top, max(-top, min(mean["k1"] for mean in means))), top


def _number(value: float, digits: int = 3) -> str:
    """With a real minus, no minus before a zero, and no decimals behind a large number.

    >>> _number(-0.25), _number(-0.0), _number(23321.6254)
    ('−0.250', '0.000', '23,322')
    """
    digits = digits if abs(value) < 100 else 0
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
