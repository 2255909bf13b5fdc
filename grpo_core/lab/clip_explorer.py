"""ClipExplorer: move the ratio and the advantage's sign, and see the objective and its slope with and without the clip."""

import ipywidgets as W
import torch

from grpo_core.lab.group_stepper import direction, signed
from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, button, figure_html, table_html
from grpo_core.surrogate import clip_range, clipped_surrogate

RATIOS = torch.linspace(0, 2.5, 251, dtype=torch.float64)
SHOWN = (0.5, 1.0, 1.5)  # Below, inside and above the usual band: the columns of the sign table.
SIGNS = {"A = +1": 1.0, "A = −1": -1.0}
HIGHS = {"same as clip eps": None, "0.28 (DAPO)": 0.28, "0.5": 0.5, "1.0": 1.0}
CLOSE = 1e-9  # A slider's 1.2 and 1 + 0.2 may differ in their last digit.


def objective(
    ratios: torch.Tensor, advantage: float, clip_eps: float = 0.2, clip_eps_high: float | None = None
) -> torch.Tensor:
    """The library's clipped surrogate as a function of the ratio itself, for one advantage."""
    log_ratios = ratios.log().unsqueeze(1)  # At ratio 0 this is −inf, and exp brings the 0 back.
    advantages = torch.full_like(ratios, advantage)
    return clipped_surrogate(log_ratios, torch.zeros_like(log_ratios), advantages, clip_eps, clip_eps_high).squeeze(1)


class ClipExplorer(Panel):
    """A slider for the ratio, two buttons for the sign of the advantage, and the two sides of the clip.

    Args:
        ratio: to begin with.
        advantage: +1 or −1.
    """

    def __init__(self, ratio: float = 1.0, advantage: float = 1.0):
        self.ratio = W.FloatSlider(value=ratio, min=0, max=2.5, step=0.01, description="ratio")
        self.down = button("◀ −0.1", lambda: self.move(-0.1), "lower the ratio by 0.1")
        self.up = button("+0.1 ▶", lambda: self.move(+0.1), "raise the ratio by 0.1")
        self.sign = W.ToggleButtons(options=SIGNS, value=advantage, style={"button_width": "80px"})
        self.clip_eps = W.FloatSlider(value=0.2, min=0.05, max=0.5, step=0.05, description="clip eps")
        self.clip_eps_high = W.Dropdown(options=list(HIGHS), description="high side")
        for control in (self.ratio, self.sign, self.clip_eps, self.clip_eps_high):
            control.observe(self.refresh, "value")
        super().__init__([[self.down, self.up, self.ratio, self.sign], [self.clip_eps, self.clip_eps_high]], height=430)

    def move(self, by: float) -> None:
        self.ratio.value = round(self.ratio.value + by, 2)  # The slider itself stops at its ends.

    @property
    def clip(self) -> tuple[float, float | None]:
        return self.clip_eps.value, HIGHS[self.clip_eps_high.value]

    @property
    def where(self) -> str:
        """inside, corner, silent (the clip binds) or wrong (outside, but on the side where it does not bind)."""
        r, advantage, (low, high) = self.ratio.value, self.sign.value, clip_range(*self.clip)
        if abs(r - (high if advantage > 0 else low)) < CLOSE:
            return "corner"
        if low - CLOSE < r < high + CLOSE:
            return "inside"
        return "silent" if (r > high) == (advantage > 0) else "wrong"

    @property
    def value(self) -> float:
        """The objective where the reader stands."""
        return objective(torch.tensor([self.ratio.value], dtype=torch.float64), self.sign.value, *self.clip).item() + 0.0

    @property
    def slope(self) -> float | None:
        """Of the objective by the ratio; None on the corner."""
        return {"silent": 0.0, "corner": None}.get(self.where, self.sign.value)

    def view(self) -> str:
        return self._story() + self._table() + self._picture()

    def static(self) -> str:
        """Both curves, and three points of each; the slopes are left to the reader."""
        low, high = clip_range(*self.clip)
        rows = []
        for name, advantage in SIGNS.items():
            values = objective(torch.tensor(SHOWN, dtype=torch.float64), advantage, *self.clip).tolist()
            for r, value in zip(SHOWN, values):
                clipped = min(max(r, low), high) * advantage
                rows.append([name, f"{r:.2f}", *(signed(x, 2) for x in (r * advantage, clipped, value))])
        header = ["advantage", "ratio", "ratio · A", "clipped ratio · A", "objective: the smaller one"]
        return table_html(header, rows) + self._picture()

    def _story(self) -> str:
        r, advantage, (low, high) = self.ratio.value, self.sign.value, clip_range(*self.clip)
        change = "as likely as" if r == 1 else f"{r:.2f} times as likely as"
        side, slope = "above" if r > 1 else "below", signed(advantage, 0)
        way, wanted = ("up", "more") if advantage > 0 else ("down", "less")
        words = {
            "inside": f"Inside the band: the clip does nothing. Slope {slope}: the token is pushed {way}.",
            "corner": f"On the corner of the curve: slope {slope} on one side, 0 on the other.",
            "silent": f"Outside the band ({side}), on the side where the advantage makes the clip bind: slope 0. "
            f"The token is {wanted} likely already; this sample asks for no more.",
            "wrong": f"Outside the band ({side}), but on the side where the clip does not bind: slope {slope}. "
            f"The token went the wrong way, and is still pushed {way}.",
        }[self.where]
        return f"<p>The token is <b>{change}</b> when it was sampled; the band is {low:.2f} to {high:.2f}.<br>{words}</p>"

    def _table(self) -> str:
        r, advantage, (low, high) = self.ratio.value, self.sign.value, clip_range(*self.clip)
        clipped_slope = signed(advantage if low < r < high else 0.0, 0)
        if min(abs(r - low), abs(r - high)) < CLOSE:
            clipped_slope = "corner"
        slope, push = ("corner", "on the corner") if self.slope is None else (signed(self.slope, 0), direction(self.slope))
        rows = [
            ["ratio · A", signed(r * advantage + 0.0), signed(advantage, 0), ""],
            ["clipped ratio · A", signed(min(max(r, low), high) * advantage), clipped_slope, ""],
            ["objective: the smaller one", signed(self.value), slope, push],
        ]
        return table_html(["", "value", "slope", "the token is"], rows, marked=2)

    def _picture(self) -> str:
        low, high = clip_range(*self.clip)
        alt = (
            f"Objective against ratio, the band {low:.2f} to {high:.2f} in gray. For A = +1 the curve with the clip rises, and "
            "is flat above the band; for A = −1 it is flat below the band, and falls from there on. Marked: "
            f"ratio {self.ratio.value:.2f}, A = {signed(self.sign.value, 0)}, objective {signed(self.value)}."
        )
        return figure_html(self._draw, alt, size=(7.2, 2.8))

    def _draw(self, figure) -> None:
        for axes, (name, advantage) in zip(figure.subplots(1, 2), SIGNS.items()):
            axes.axvspan(*clip_range(*self.clip), color=GRAY, alpha=0.15, linewidth=0)
            axes.plot(RATIOS, RATIOS * advantage, "--", color=GRAY, label="no clip")
            curve = objective(RATIOS, advantage, *self.clip)
            axes.plot(RATIOS, curve, color=BLUE if advantage > 0 else ORANGE, linewidth=2, label="with clip")
            if advantage == self.sign.value:
                self._mark(axes)
            limits, ticks = ((-0.2, 2.8), (0, 1, 2)) if advantage > 0 else ((-2.8, 0.2), (-2, -1, 0))
            axes.set(xlabel="ratio", xticks=(0, 0.5, 1, 1.5, 2, 2.5), ylim=limits, yticks=ticks)
            axes.set_title(name, fontsize=10)
            axes.legend(frameon=False, fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)

    def _mark(self, axes) -> None:
        """A dot where the reader stands, and an arrow the way the update moves it: uphill, or nowhere."""
        r, value = self.ratio.value, self.value
        axes.plot(r, value, "o", color="black", markersize=8)
        if self.slope:
            axes.annotate("", xy=(r + 0.3 * self.slope, value + 0.3), xytext=(r, value), arrowprops={"arrowstyle": "->"})
