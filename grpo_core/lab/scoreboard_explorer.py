"""ScoreboardExplorer: pick two methods; see their curves, their difference, and what one update of each does to one group."""

import html
import math

import ipywidgets as W
import pandas as pd

from grpo_core.evaluate import Estimate, mean_estimate
from grpo_core.lab.group_stepper import RECORDED_GROUP, signed
from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, figure_html
from grpo_core.lab.token_effects import OWN_GROUP, UPDATES, token_effects
from grpo_core.studies.scoreboard import difference, final_accuracies

AXES = {
    "texts seen": ["completions", "answers"],
    "gradient steps": ["gradient_steps"],
    "tokens trained on": ["tokens"],
}
GROUPS = {"worked group": RECORDED_GROUP, "its own first group": OWN_GROUP}
SOURCES = {
    "worked group": "The worked group of this series was sampled by another policy: for this one, 73; and 74; are rare.",
    "its own first group": "This group the start policy sampled itself, in the first iteration of a run with seed 0.",
}
COLUMNS = {"method", "steps", "seed", "accuracy", *(column for columns in AXES.values() for column in columns)}
STYLES = ((BLUE, "o-"), (ORANGE, "s--"))


class ScoreboardExplorer(Panel):
    """Two methods side by side.

    Args:
        curves: outputs/scoreboard/curves.csv: the rows of all runs, several seeds each.

    Raises:
        ValueError: columns are missing, or there are fewer than two methods or two seeds.
    """

    def __init__(self, curves: pd.DataFrame):
        if missing := COLUMNS - set(curves.columns):
            raise ValueError(f"curves lacks the columns {sorted(missing)}: give the table that `scoreboard` has written")
        methods = [name for name in UPDATES if name in set(curves["method"])]
        self.seeds = curves["seed"].nunique()
        if len(methods) < 2 or self.seeds < 2:
            raise ValueError(f"two methods and two seeds are the least; curves has {len(methods)} and {self.seeds}")
        self.curves = curves
        steps = sorted(curves["steps"].unique().tolist())
        self.one = W.Dropdown(options=methods, value=methods[0], description="method")
        self.other = W.Dropdown(options=methods, value=methods[-1], description="against")
        self.steps = W.ToggleButtons(options={f"{n} gradient steps": n for n in steps}, style={"button_width": "150px"})
        self.axis = W.Dropdown(options=list(AXES), description="x axis")
        self.group = W.Dropdown(options=list(GROUPS), value="its own first group", description="group")
        for control in (self.one, self.other, self.steps, self.axis, self.group):
            control.observe(self.refresh, "value")
        super().__init__([[self.one, self.other, self.steps], [self.axis, self.group]], height=830)

    @property
    def methods(self) -> tuple[str, str]:
        return self.one.value, self.other.value

    @property
    def difference(self) -> Estimate:
        """How much more accurate the first method ends than the second, paired over seeds."""
        return difference(self.curves, *self.methods, self.steps.value)

    def curve(self, method: str) -> pd.DataFrame:
        """x, value, low and high after each round: means over seeds, and the 95 % interval of the accuracy."""
        runs = self.curves[(self.curves["method"] == method) & (self.curves["steps"] == self.steps.value)]
        runs = runs.assign(x=runs[AXES[self.axis.value]].sum(axis=1), round=runs.groupby("seed").cumcount())
        points = []
        for _, rows in runs.groupby("round"):
            e = mean_estimate(rows["accuracy"].tolist())
            points.append({"x": rows["x"].mean(), "value": e.value, "low": max(e.low, 0.0), "high": min(e.high, 1.0)})
        return pd.DataFrame(points)

    def view(self) -> str:
        return self._story() + self._picture() + self._effects()

    def _story(self) -> str:
        ends = " ".join(
            f"<b>{html.escape(name)}</b> ends at {mean_estimate(final_accuracies(self.curves, name, self.steps.value))}."
            for name in dict.fromkeys(self.methods)
        )
        return f"<p>{ends} {self._verdict()}</p>"

    def _verdict(self) -> str:
        if self.one.value == self.other.value:
            return "Pick two different methods to compare them."
        gap = self.difference
        shown = f"{signed(gap.value)} [{signed(gap.low)}, {signed(gap.high)}]"
        if gap.low > 0 or gap.high < 0:
            better = self.one.value if gap > 0 else self.other.value
            return f"Difference {shown}: <b>{html.escape(better)} is better</b>, by more than the luck of {self.seeds} seeds."
        return f"Difference {shown}: <b>no difference that {self.seeds} seeds could show</b>. It may be anywhere in there."

    def _picture(self) -> str:
        curves = {name: self.curve(name) for name in dict.fromkeys(self.methods)}

        def draw(figure):
            left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (2.2, 1)})
            for (name, curve), (color, style) in zip(curves.items(), STYLES):
                left.fill_between(curve["x"], curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0)
                left.plot(curve["x"], curve["value"], style, color=color, markersize=4, label=name)
            left.set(ylim=(0, 1), xlabel=self.axis.value, title="greedy accuracy, held-out, 95 % band")
            left.legend(frameon=False, loc="lower right", fontsize=9)
            self._draw_difference(right)
            for axes in (left, right):
                axes.spines[["top", "right"]].set_visible(False)

        ends = ", ".join(f"{name} from {c['value'].iloc[0]:.3f} to {c['value'].iloc[-1]:.3f}" for name, c in curves.items())
        alt = f"Greedy accuracy against {self.axis.value}: {ends}. Right: the difference at the end, seed by seed."
        return figure_html(draw, alt, size=(8.6, 2.9))

    def _draw_difference(self, axes) -> None:
        """A dot for each seed, and their mean with its interval, against the line of no difference."""
        ends = (final_accuracies(self.curves, name, self.steps.value) for name in self.methods)
        gaps = [a - b for a, b in zip(*ends)]
        gap = self.difference
        axes.axhline(0, color="black", linewidth=0.8)
        axes.plot([0] * len(gaps), gaps, "o", color=GRAY, markersize=4, alpha=0.7)
        axes.errorbar(0.5, gap.value, [[gap.value - gap.low], [gap.high - gap.value]], fmt="D", color="black", capsize=4)
        reach = max(0.05, 1.15 * max(abs(gap.low), abs(gap.high), *map(abs, gaps)))
        axes.set(xlim=(-0.5, 1), ylim=(-reach, reach), title="difference at the end")
        axes.set_xticks([0, 0.5], ["seeds", "mean"])

    def _effects(self) -> str:
        group = GROUPS[self.group.value]
        columns = ""
        for name in self.methods:
            effects = token_effects(name, group)
            columns += f"<div><p><b>{html.escape(name)}</b></p>{push_table(effects)}{change_table(effects)}</div>"
        return (
            f"<p><b>One update on this group alone</b>, <code>{html.escape(group.prompt)}</code> with the true answer "
            f"{html.escape(group.answer)}. {SOURCES[self.group.value]} First table: the push of the loss on each token. Second "
            "table: all pushes on the same token together → what one step of AdamW adds to its log-prob; and the chance of the "
            f'whole text, before → after.</p><div style="display:flex;flex-wrap:wrap;gap:8px 28px">{columns}</div>'
        )


def push_table(effects: pd.DataFrame) -> str:
    """One row for each completion, one column for each token: the sign in an arrow, the size in a number and a bar."""
    largest = effects["push"].abs().max()
    last = effects["completion"].max()
    rows = []
    for number, tokens in effects.groupby("completion"):
        text, reward = tokens["text"].iloc[0], tokens["reward"].iloc[0]
        cells = [f"<code>{html.escape(token)}</code> {push_html(push, largest)}" for token, push in tokens_of(tokens, "push")]
        rows.append([f"<code>{html.escape(text)}</code>", "true answer" if number == last else f"{reward:g}", *cells])
    return _table(["completion", "reward", *_ordinals(effects)], rows)


def change_table(effects: pd.DataFrame) -> str:
    """One row for each distinct completion: pushes that meet in the same token, and what the step makes of them."""
    rows = []
    for text, tokens in effects.drop_duplicates(["text", "t"]).groupby("text", sort=False):
        cells = [
            f"<code>{html.escape(token)}</code> {signed(net, 2)} → {signed(round(change, 2) + 0.0, 2)}"
            for (token, net), change in zip(tokens_of(tokens, "net"), tokens["change"])
        ]
        before = tokens["before"].sum()
        chances = f"{math.exp(before):.3f} → {math.exp(before + tokens['change'].sum()):.3f}"
        rows.append([f"<code>{html.escape(text)}</code>", *cells, chances])
    return _table(["text", *_ordinals(effects), "chance"], rows)


def tokens_of(rows: pd.DataFrame, column: str) -> list[tuple[str, float]]:
    """Tokens with a number each; what rounds to 0 is 0, without a sign."""
    return [(token, round(value, 3) + 0.0) for token, value in zip(rows["token"], rows[column])]


def push_html(push: float, largest: float) -> str:
    """An arrow, the number, and a bar as long as the push."""
    color, arrow = (BLUE, "▲") if push > 0 else (ORANGE, "▼") if push < 0 else (GRAY, "●")
    width = round(28 * abs(push) / largest) if largest else 0
    bar = f'<span style="display:inline-block;height:9px;width:{width}px;background:{color}"></span>'
    return f'<span style="color:{color}">{arrow}</span> {signed(push, 2)} {bar}'


def _ordinals(effects: pd.DataFrame) -> list[str]:
    return [f"token {t + 1}" for t in range(effects["t"].max() + 1)]


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f'<th style="text-align:left">{cell}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    style = "border-spacing:8px 1px;font-size:12px;font-variant-numeric:tabular-nums;white-space:nowrap;margin-bottom:8px"
    return f'<table style="{style}"><tr>{head}</tr>{body}</table>'
