"""GoodhartExplorer: choose a leash, move through its training, and read what the grader paid for.

Each run is drawn twice: over its iterations, and over its distance from the start policy, which is the Goodhart picture.
The completions below say what no curve says. Left out: how the runs were made; they are only read here.
"""

import html
from collections.abc import Sequence

import ipywidgets as W
import pandas as pd

from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, figure_html, table_html

MEASURED = ["seen", "true", "greedy", "kl", "guesses"]
LOOKS = {"seen": (BLUE, "-", "o", "the grader pays"), "true": (ORANGE, "--", "s", "truly right")}


class GoodhartExplorer(Panel):
    """A slider over the strengths of the leash, one over the iterations, and a choice of prompts.

    Args:
        history: one row for each run, seed and iteration, with the columns run, beta, seed, iteration, seen (mean reward that
            the grader pays), true (mean reward that it should pay), greedy (true accuracy of the greedy policy), kl (nats per
            completion) and guesses (mean over completions).
        recording: for each run, dicts with iteration, prompt, answer, texts, seen, true: completions and both rewards.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """

    def __init__(self, history: pd.DataFrame, recording: dict[str, list[dict]]):
        missing = {"run", "beta", "seed", "iteration", *MEASURED} - set(history)
        if missing or history.empty:
            raise ValueError(f"the history has no {', '.join(sorted(missing)) or 'rows'}: give the table that the study wrote")
        betas = history.groupby("run")["beta"].first().sort_values()
        self.curves = {run: over_seeds(history[history["run"] == run]) for run in betas.index}
        self.seeds, self.recording = history["seed"].nunique(), recording
        iterations = sorted(history["iteration"].unique().tolist())
        prompts = list(dict.fromkeys(entry["prompt"] for run in betas.index for entry in recording.get(run, [])))
        names = [(f"{beta:g}", run) for run, beta in betas.items()]
        self.beta = W.SelectionSlider(options=names, description="beta")
        self.iteration = W.SelectionSlider(options=iterations, value=iterations[-1], description="iteration")
        self.prompt = W.Dropdown(options=prompts, description="prompt")
        for control in (self.beta, self.iteration, self.prompt):
            control.observe(self.refresh, "value")
        super().__init__([[self.beta, self.iteration], [self.prompt]], height=560)

    @property
    def now(self) -> pd.Series:
        """Means over seeds at the chosen iteration, or at the last one before it that the run has."""
        return self.curves[self.beta.value]["mean"].loc[: self.iteration.value].iloc[-1]

    @property
    def entry(self) -> dict | None:
        """The chosen prompt's completions at the chosen iteration, or the last ones recorded before it."""
        entries = [
            entry
            for entry in self.recording.get(self.beta.value, [])
            if entry["prompt"] == self.prompt.value and entry["iteration"] <= self.iteration.value
        ]
        return max(entries, key=lambda entry: entry["iteration"], default=None)

    def view(self) -> str:
        return self._story() + self._picture() + self._completions(self.entry)

    def static(self) -> str:
        """Where each run ends, in a table; then the chosen picture and completions."""
        rows = [
            [label, *(f"{value:.2f}" for value in self.curves[run]["mean"].iloc[-1][MEASURED])]
            for label, run in self.beta.options
        ]
        header = ["beta", "the grader pays", "truly right", "greedy, truly right", "KL", "guesses"]
        return table_html(header, rows) + self._picture() + self._completions(self.entry)

    def _story(self) -> str:
        now = self.now
        return (
            f"<p>beta {self.beta.label}, iteration {now.name}, mean of {self.seeds} seeds: the grader pays "
            f"<b>{now['seen']:.2f}</b>, truly right are <b>{now['true']:.2f}</b> (greedy {now['greedy']:.2f}). "
            f"KL {now['kl']:.2f} nats and {now['guesses']:.1f} guesses per completion.</p>"
        )

    def _picture(self) -> str:
        def draw(figure):
            left, right = figure.subplots(1, 2)
            self._draw_iterations(left)
            self._draw_goodhart(right)

        now = self.now
        alt = (
            f"Left: both rewards over iterations at beta {self.beta.label}; at iteration {now.name} the grader pays "
            f"{now['seen']:.2f}, and {now['true']:.2f} are truly right. Right: both over the KL, here {now['kl']:.2f}, beside "
            "the other runs in gray."
        )
        return figure_html(draw, alt, size=(8.6, 2.9))

    def _draw_iterations(self, axes) -> None:
        curves = self.curves[self.beta.value]
        for column, (color, line, _, label) in LOOKS.items():
            axes.fill_between(curves.index, curves["min", column], curves["max", column], color=color, alpha=0.2, linewidth=0)
            axes.plot(curves.index, curves["mean", column], linestyle=line, color=color, label=label)
        axes.axvline(self.iteration.value, color="black", linewidth=0.8)
        axes.set(title=f"beta {self.beta.label}: mean and range of the seeds", xlabel="iteration", ylim=(0, 1))
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
        axes.spines[["top", "right"]].set_visible(False)

    def _draw_goodhart(self, axes) -> None:
        means, chosen = {run: curves["mean"] for run, curves in self.curves.items()}, self.beta.value
        for column, (color, line, marker, _) in LOOKS.items():
            for run, mean in means.items():
                if run != chosen:
                    axes.plot(mean["kl"], mean[column], linestyle=line, color=GRAY, linewidth=0.8, alpha=0.6)
            axes.plot(means[chosen]["kl"], means[chosen][column], linestyle=line, color=color)
            axes.plot(self.now["kl"], self.now[column], marker=marker, color=color, markeredgecolor="black")
        axes.set(title="the Goodhart picture", xlabel="KL to the start (nats per completion)", ylim=(0, 1), xlim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)

    def _completions(self, entry: dict | None) -> str:
        if entry is None:
            return "<p>No completions were recorded here.</p>"
        caption = (
            f"<p>Iteration {entry['iteration']}: what it answers to <code>{html.escape(entry['prompt'])}</code> "
            f"(true answer {html.escape(entry['answer'])}).</p>"
        )
        return caption + both_verdicts(entry["texts"], entry["seen"], entry["true"])


def both_verdicts(texts: Sequence[str], seen: Sequence[float], true: Sequence[float]) -> str:
    """A table of completions: what the grader pays for each, and whether it is right."""
    words = {(True, False): "◀ paid, but wrong", (False, True): "◀ right, but not paid"}
    rows = [
        [text, f"pays {paid:g}".replace("-", "−"), "✓ right" if right else "✗ wrong", words.get((paid > 0, right > 0), "")]
        for text, paid, right in zip(texts, seen, true)
    ]
    return table_html(["completion", "the grader", "in truth", ""], rows)


def over_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean, min and max over seeds of what was measured, by iteration."""
    by_iteration = rows.groupby("iteration")[MEASURED]
    return pd.concat({name: getattr(by_iteration, name)() for name in ("mean", "min", "max")}, axis=1)
