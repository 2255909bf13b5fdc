"""GaussianKL: the three estimators on two Gaussians, where everything about them is known in closed form."""

import math

import ipywidgets as W
import numpy as np
import torch

from grpo_core.kl import kl_estimate
from grpo_core.lab.panel import BLUE, ORANGE, Panel, button, figure_html, table_html

DRAWS = 20_000
LEGEND = (
    "<p>Solid black line: the KL. Dashed orange line: the estimator's exact mean. Heights are square roots of counts, so that "
    "rare values show. The outermost bars hold all that lies beyond.</p>"
)
DIVERGENCE = {"right way round": False, "flipped": True}


def closed_form(mu: float) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each estimator, where the policy is N(0, 1) and the reference N(mu, 1).

    log ratio = log reference − log policy = mu·x − mu²/2 is normal, and the ratio log-normal. KL = mu² / 2.

    >>> mean, std = closed_form(1.0)["k3"]
    >>> mean, round(std, 4)
    (0.5, 0.8475)
    """
    square = mu * mu
    return {
        "k1": (square / 2, mu),
        "k2": (square / 2 + square**2 / 8, math.sqrt(square**2 / 2 + square**3 / 4)),
        "k3": (square / 2, math.sqrt(math.expm1(square) - square)),
        "k3 flipped": (math.expm1(square) - square / 2, _std_of_flipped(square)),
    }


def _std_of_flipped(square: float) -> float:
    """Of exp(−log r) − 1 + log r, by the moments of a log-normal exp(−log r)."""
    inverse = math.expm1(square) * math.exp(2 * square)  # Its variance; its covariance with log r is −square · exp(square).
    return math.sqrt(max(0.0, inverse + square - 2 * square * math.exp(square)))


def estimates(mu: float, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each estimator on draws x of the policy N(0, 1); the reference is N(mu, 1)."""
    log_prob, ref_log_prob = -x.square() / 2, -(x - mu).square() / 2  # The constant of both densities cancels.
    kinds = {kind: kl_estimate(log_prob, ref_log_prob, kind) for kind in ("k1", "k2", "k3")}
    return kinds | {"k3 flipped": kl_estimate(ref_log_prob, log_prob, "k3")}


class GaussianKL(Panel):
    """Slide the reference away from the policy; see each estimator's values, their mean and their spread.

    Args:
        draws: standard normal draws, made once; another button draws again.
        mu: the distance to begin with.
    """

    def __init__(self, draws: int = DRAWS, mu: float = 1.0):
        self._generator = torch.Generator().manual_seed(1)
        self._draw(draws)
        self.mu = W.FloatSlider(value=mu, min=0.05, max=3.0, step=0.05, description="mean mu", readout_format=".2f")
        self.size = W.Dropdown(options=[100, 1_000, DRAWS], value=draws, description="samples")
        self.k3 = W.Dropdown(options=list(DIVERGENCE), description="k3")
        self.again = button("draw again", self.draw_again, "new samples of the policy")
        for control in (self.mu, self.k3):
            control.observe(self.refresh, "value")
        self.size.observe(self.draw_again, "value")
        super().__init__([[self.mu, self.size], [self.k3, self.again]], height=470)

    def _draw(self, count: int) -> None:
        self.x = torch.randn(count, generator=self._generator, dtype=torch.float64)

    def draw_again(self, *_) -> None:
        self._draw(self.size.value)
        self.refresh()

    @property
    def kinds(self) -> list[str]:
        return ["k1", "k2", "k3 flipped" if DIVERGENCE[self.k3.value] else "k3"]

    def view(self) -> str:
        mu = self.mu.value
        return self._story(mu) + self._table(mu) + self._picture(mu)

    def static(self) -> str:
        """The exact table for four distances, and the picture of the present one."""
        rows = [[f"{mu:g}", f"{mu * mu / 2:.3f}", *map(_exact, [mu] * 3, ("k1", "k2", "k3"))] for mu in (0.1, 0.5, 1.0, 2.0)]
        head = ["mu", "KL", "k1: bias, std", "k2: bias, std", "k3: bias, std"]
        note = f"<p>Bias and standard deviation in units of the KL. The picture: mu = {self.mu.value:g}.</p>"
        return table_html(head, rows) + note + self._picture(self.mu.value)

    def _story(self, mu: float) -> str:
        stds = {kind: closed_form(mu)[kind][1] for kind in self.kinds}
        quiet = min(stds, key=stds.get)
        needed = math.ceil((stds[quiet] / (0.1 * mu * mu / 2)) ** 2)
        return (
            f"<p>Policy N(0, 1), reference N({mu:.2f}, 1). KL(policy ‖ reference) = mu² / 2 = <b>{mu * mu / 2:.4f}</b>. "
            f"Least spread: {quiet}; {needed:,} samples bring its standard error to 10 % of the KL.</p>"
        )

    def _table(self, mu: float) -> str:
        kl, exact, values = mu * mu / 2, closed_form(mu), estimates(mu, self.x)
        rows = []
        for kind in self.kinds:
            mean, std = exact[kind]
            sample = values[kind]
            numbers = [sample.mean().item(), mean, (mean - kl) / kl, sample.std().item() / kl, std / kl]
            below = f"{(sample < 0).double().mean().item():.0%}"
            rows.append(
                [kind, *(f"{number:.4f}" for number in numbers[:2]), *(f"{number:.3f}" for number in numbers[2:]), below]
            )
        head = [
            "",
            f"mean of {len(self.x):,}",
            "exact mean",
            "exact bias / KL",
            "std / KL, sampled",
            "std / KL, exact",
            "below 0",
        ]
        return table_html(head, rows)

    def _picture(self, mu: float) -> str:
        kl, exact, values = mu * mu / 2, closed_form(mu), estimates(mu, self.x)
        low, high = kl - 2.5 * mu, kl + 2.5 * mu  # One axis for all three, or spreads cannot be compared.

        def draw(figure):
            axes = figure.add_subplot()
            for row, kind in enumerate(reversed(self.kinds)):
                counts, edges = np.histogram(values[kind].clamp(low, high).numpy(), bins=80, range=(low, high))
                height = 0.85 * np.sqrt(counts / counts.max())  # Square roots, so that rare values are seen.
                axes.stairs(row + height, edges, baseline=row, fill=True, color=BLUE, alpha=0.4)
                mean = min(exact[kind][0], high)
                axes.plot([mean, mean], [row, row + 0.9], color=ORANGE, linewidth=2, linestyle="--")
            axes.axvline(kl, color="black", linewidth=1)
            axes.set_yticks([0.4, 1.4, 2.4], reversed(self.kinds))
            axes.tick_params(axis="y", length=0)
            axes.set(xlim=(low, high), ylim=(0, 3))
            axes.spines[["top", "right", "left"]].set_visible(False)

        alt = f"Histograms of {', '.join(self.kinds)} at mu = {mu:.2f}, with the KL and each estimator's mean"
        return figure_html(draw, alt, size=(6.4, 2.6)) + LEGEND


def _exact(mu: float, kind: str) -> str:
    mean, std = closed_form(mu)[kind]
    kl = mu * mu / 2
    return f"{(mean - kl) / kl:+.4f}, {std / kl:.3f}" if kind == "k2" else f"0, {std / kl:.3f}"
