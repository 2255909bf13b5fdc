"""MemoryExplorer: choose a model, what is trained and by which method, and see which part takes how many gigabytes.

The numbers are those of `grpo_core.bridge.scale.memory`, which says what is left out. Nothing of that size is built here.
"""

import html

import ipywidgets as W
import pandas as pd

from grpo_core.bridge.scale import GPU_MEMORY, MODELS, gpus_needed, memory, peak
from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, figure_html, table_html

METHODS = {  # critic, leash
    "GRPO with a leash": (False, True),
    "GRPO, beta 0": (False, False),
    "PPO with a critic and a leash": (True, True),
}
TRAINED = {"all weights": "all", "LoRA, rank 16": "lora"}
ROWS = [2**power for power in range(10)]
NAMES = {
    "policy": "policy: weights", "gradients": "policy: gradients", "Adam": "policy: Adam", "reference": "reference",
    "critic": "critic, trained", "cache": "keys and values", "logits": "logits",
}  # fmt: skip
LOOKS = {  # Told apart by hatches, too.
    "policy": (BLUE, ""), "gradients": (BLUE, "//"), "Adam": (BLUE, ".."), "reference": (GRAY, ""), "critic": (ORANGE, ""),
    "cache": ("white", "xx"), "logits": ("white", "||"),
}  # fmt: skip
MOMENTS = {"sampling": "while\nsampling", "updating": "while\nupdating"}


class MemoryExplorer(Panel):
    """A model, what is trained, a method, and how many rows are in work at a time; completions have 1000 tokens.

    It needs transformers, to count the parameters: they are counted once.
    """

    def __init__(self):
        self.model = W.Dropdown(options=list(MODELS), value="Qwen2.5-7B", description="model")
        self.trained = W.ToggleButtons(options=list(TRAINED), description="trained", style={"button_width": "120px"})
        self.method = W.Dropdown(options=list(METHODS), description="method", layout=W.Layout(width="330px"))
        self.rows = W.SelectionSlider(options=ROWS, value=8, description="rows")
        for control in (self.model, self.trained, self.method, self.rows):
            control.observe(self.refresh, "value")
        super().__init__([[self.model, self.trained], [self.method, self.rows]], height=400)

    def frame(self, model: str | None = None, trained: str | None = None, method: str | None = None) -> pd.DataFrame:
        """What `memory` says of the chosen setting, or of another one."""
        critic, leash = METHODS[method or self.method.value]
        how = TRAINED[trained or self.trained.value]
        return memory(model or self.model.value, how, critic, leash, rows=self.rows.value)

    def view(self) -> str:
        return self._story() + self._picture()

    def static(self) -> str:
        """Every model, trained in each way by each method."""
        rows = []
        for model in MODELS:
            for trained in TRAINED:
                for method in METHODS:
                    frame = self.frame(model, trained, method)
                    cells = [gigabytes(value) for value in [*frame["GB"], peak(frame)]]
                    rows.append([model, trained, method, *cells, str(gpus_needed(peak(frame)))])
        header = ["model", "trained", "method", *NAMES.values(), "peak", "80 GB GPUs"]
        note = f"<p>Gigabytes, with {self.rows.value} rows of 1000 tokens at a time.</p>"
        return self._picture() + note + table_html(header, rows)

    def _story(self) -> str:
        frame = self.frame()
        held = frame["GB"][frame["when"] == "always"].sum()
        most, parts = peak(frame), frame["GB"]
        gpus = gpus_needed(most)
        return (
            f"<p><b>{self.model.value}</b>, {self.trained.value} trained, {html.escape(self.method.value)}: "
            f"<b>{gigabytes(held)} GB</b> are held all the time. {self._critic()} With {self.rows.value} rows of 1000 tokens, "
            f"sampling adds {gigabytes(parts['cache'])} GB of keys and values, an update {gigabytes(parts['logits'])} GB of "
            f"logits. At the peak {gigabytes(most)} GB: at least <b>{gpus} GPU{'s' * (gpus > 1)}</b> of 80 GB.</p>"
        )

    def _critic(self) -> str:
        critic = self.frame(method="PPO with a critic and a leash")["GB"]["critic"]
        has_one = METHODS[self.method.value][0]
        return f"The critic is {gigabytes(critic)} GB of it." if has_one else f"A critic would add {gigabytes(critic)} GB."

    def _picture(self) -> str:
        frame = self.frame()
        said = ", ".join(f"{NAMES[part]} {gigabytes(value)}" for part, value in frame["GB"].items() if value)
        alt = f"Bars of gigabytes for {self.model.value}, {self.trained.value}: {said}; a line for every 80 GB."
        return figure_html(lambda figure: draw_memory(figure, frame), alt, size=(8.6, 2.9))


def draw_memory(figure, frame: pd.DataFrame) -> None:
    """Two stacked bars, for the two moments of an iteration, against the memory of one GPU, two, three …

    Args:
        figure: to draw on.
        frame: what `memory` returns.
    """
    axes = figure.add_axes((0.11, 0.37, 0.87, 0.52))
    left = dict.fromkeys(MOMENTS, 0.0)
    for part, (color, hatch) in LOOKS.items():
        when, size = frame.loc[part]
        moments = [moment for moment in MOMENTS if when in ("always", moment)]
        if size:
            axes.barh(
                [MOMENTS[moment] for moment in moments], size, left=[left[moment] for moment in moments], color=color,
                hatch=hatch, edgecolor="black", linewidth=0.6, height=0.6, label=f"{NAMES[part]} {gigabytes(size)}",
            )  # fmt: skip
        for moment in moments:
            left[moment] += size
    one, end = GPU_MEMORY / 1e9, max(1.04 * peak(frame), 88)
    lines = [count * one for count in range(1, int(end // one) + 1)]
    axes.vlines(lines, -0.45, 1.45, color="black", linestyle="--", linewidth=[1.4, *[0.5] * (len(lines) - 1)])
    axes.set(xlim=(0, end), ylim=(-0.45, 1.45), xlabel="GB; a dashed line for each 80 GB, the memory of one GPU")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower center", ncols=4, frameon=False, fontsize=8, handleheight=1.3)


def gigabytes(value: float) -> str:
    """Readable at each size.

    >>> gigabytes(0.0574), gigabytes(15.23), gigabytes(2471.8), gigabytes(0.0)
    ('0.06', '15.2', '2,472', '0')
    """
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
