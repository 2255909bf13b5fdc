"""BetaLab: choose settings, press Run, and compare runs in one picture and one table."""

import base64
import html
from dataclasses import asdict, fields

import ipywidgets as W
import pandas as pd

from grpo_core.config import GRPOConfig
from grpo_core.evaluate import proportion
from grpo_core.lab.live_run import Training, TrainingPanel, curve, draw_accuracy, draw_kl
from grpo_core.lab.panel import button, figure_html, table_html

LOOKS = [  # Color, marker, and the same marker as a character: runs differ in color and shape, and carry a number.
    ("#0072b2", "o", "●"), ("#d55e00", "s", "■"), ("#009e73", "^", "▲"), ("#cc79a7", "D", "◆"), ("#000000", "v", "▼"),
    ("#e69f00", "P", "✚"), ("#56b4e9", "X", "✖"), ("#767676", "*", "★"),
]  # fmt: skip
LEARNING_RATES = [0.0, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 1e-2, 100.0]
WORDS = {
    "beta": "beta", "clip_eps": "clip_eps", "group_size": "group size", "prompts_per_iteration": "prompts",
    "temperature": "temperature", "inner_epochs": "inner epochs", "learning_rate": "learning rate",
    "aggregation": "aggregation", "scale": "scale", "correction": "correction", "iterations": "iterations", "seed": "seed",
}  # fmt: skip
RECORDED = {  # beta: right answers among 400 validation problems and KL, at iterations 0, 5, 10, 15, 20; then the seconds.
    0.08: ((140, 260, 291, 313, 318), (None, 0.116, 0.258, 0.220, 0.196), 2.3),
    0.0: ((140, 258, 293, 322, 326), (None, 0.146, 0.299, 0.277, 0.194), 2.3),
    1.0: ((140, 191, 192, 203, 205), (None, 0.021, 0.041, 0.030, 0.031), 2.5),
}


class BetaLab(TrainingPanel):
    """Settings above, runs below: accuracy and KL over iterations, a table, and the table as CSV.

    Accuracy is measured on the validation problems: who chooses settings here must not choose them on the held-out ones.

    Args:
        settings: values of GRPOConfig to begin with, in place of its defaults.
    """

    def __init__(self, **settings):
        self.runs: list[Training] = []
        self._shown, self._runs = None, ""
        default = {field.name: field.default for field in fields(GRPOConfig)} | settings
        self.controls = {name: make(default[name]) for name, make in CONTROLS.items()}
        for name, control in self.controls.items():
            control.description, control.style = WORDS[name], {"description_width": "95px"}
            control.layout = W.Layout(width="290px")
            control.observe(self.refresh, "value")
        controls = list(self.controls.values())
        rows = [controls[i : i + 3] for i in range(0, len(controls), 3)]
        self.clear_button = button("Clear", self.clear, "forget all runs")
        super().__init__([self.clear_button], rows, height=520)

    @property
    def config(self) -> GRPOConfig:
        """The settings as they stand; a ValueError says why they are impossible."""
        return GRPOConfig(**{name: control.value for name, control in self.controls.items()}, evaluate_on="validation")

    def make(self) -> Training:
        training = Training(self.config)
        self.runs.append(training)
        return training

    def add(self, **settings) -> Training:
        """Train with GRPO's defaults and these settings here and now, as a cell does, and add the run."""
        self.training = Training(GRPOConfig(**{"evaluate_on": "validation"} | settings))
        self.runs.append(self.training)
        return self.training.run(self._changed)

    def clear(self) -> None:
        """Forget all runs; one that is under way is stopped."""
        with self._lock:
            self.stop()
            self.training, self.runs = None, []
            self.progress.value = 0
            self.refresh()

    @property
    def frame(self) -> pd.DataFrame:
        """All runs, one a row: settings, the last measured accuracy with its interval, KL, seconds."""
        return frame_of(self.runs)

    def view(self) -> str:
        shown = [(run, run.state, len(run.history.rows)) for run in self.runs]
        if shown != self._shown:  # Not for a moved slider: a picture takes long enough for a click on Run to overtake it.
            self._shown, self._runs = shown, runs_html(self.runs) + _download(self.runs)
        return f"<p>{self._next_run()}</p>{self._runs}"

    def _next_run(self) -> str:
        try:
            config = self.config
        except ValueError as error:
            return f"<b>Not possible:</b> {html.escape(str(error))}"
        samples = config.prompts_per_iteration * config.group_size
        return f"Next run: {html.escape(differences(config))}; {samples} completions an iteration."

    def static(self) -> str:
        return (
            "<p><b>With a running kernel:</b> choose settings, press Run, compare. Below are runs that were recorded on one "
            f"machine; on another the digits differ.</p>{runs_html(self.runs or recorded_runs())}"
        )


def _slider(kind, low, high, step):
    return lambda value: kind(value=value, min=low, max=high, step=step, continuous_update=False)


def _choice(*options):
    return lambda value: W.Dropdown(options=sorted({*options, value}), value=value)


CONTROLS = {  # The ends of some sliders are impossible on purpose: the lab says why.
    "beta": _slider(W.FloatSlider, 0.0, 1.0, 0.02),
    "clip_eps": _slider(W.FloatSlider, 0.0, 1.0, 0.05),
    "group_size": _slider(W.IntSlider, 1, 16, 1),
    "prompts_per_iteration": _choice(12, 24, 48, 96, 192),
    "temperature": _slider(W.FloatSlider, 0.0, 2.0, 0.1),
    "inner_epochs": _slider(W.IntSlider, 1, 8, 1),
    "learning_rate": _choice(*LEARNING_RATES),
    "aggregation": _choice("token", "sequence", "constant"),
    "scale": _choice("std", "none"),
    "correction": _choice(0, 1),
    "iterations": _slider(W.IntSlider, 5, 60, 5),
    "seed": lambda value: W.BoundedIntText(value=value, min=0, max=999),
}


def differences(config: GRPOConfig) -> str:
    """The settings that are not GRPO's defaults, in words.

    >>> differences(GRPOConfig()), differences(GRPOConfig(beta=0.3, group_size=4))
    ('defaults', 'beta 0.3, group size 4')
    """
    default = GRPOConfig()
    changed = {name: getattr(config, name) for name in WORDS if getattr(config, name) != getattr(default, name)}
    return ", ".join(f"{WORDS[name]} {value}" for name, value in changed.items()) or "defaults"


def frame_of(runs: list[Training]) -> pd.DataFrame:
    """One row a run, with all settings that the lab knows."""
    rows = []
    for number, run in enumerate(runs, 1):
        accuracy = run.accuracy
        interval = (None, None, None) if accuracy is None else (accuracy.value, accuracy.low, accuracy.high)
        rows.append(
            {"run": number}
            | {name: value for name, value in asdict(run.config).items() if name in WORDS}
            | {"iteration": run.iteration}
            | dict(zip(("accuracy", "accuracy_low", "accuracy_high"), interval))
            | {"kl": run.latest("kl"), "seconds": run.seconds, "state": run.state}
        )
    columns = ["run", *WORDS, "iteration", "accuracy", "accuracy_low", "accuracy_high", "kl", "seconds", "state"]
    return pd.DataFrame(rows, columns=columns)


def runs_html(runs: list[Training]) -> str:
    """The picture and the table."""
    header = ["run", "settings", "greedy accuracy, 95 % interval", "KL", "seconds", "state"]
    table = table_html(header, [_table_row(number, run) for number, run in enumerate(runs, 1)]) if runs else ""
    problems = "".join(f"<p>Run {i}: {html.escape(run.problem)}</p>" for i, run in enumerate(runs, 1) if run.problem)
    return f"{_picture(runs)}<div style='max-height:180px;overflow-y:auto'>{table}{problems}</div>"


def _table_row(number: int, run: Training) -> list[str]:
    kl, seconds = run.latest("kl"), run.seconds
    accuracy = "–" if run.accuracy is None else str(run.accuracy)
    state = run.state if run.state == "finished" else f"{run.state} at iteration {run.iteration}"
    look = LOOKS[(number - 1) % len(LOOKS)][2]
    return [f"{look} {number}", differences(run.config), accuracy, "–" if kl is None else f"{kl:.3f}", f"{seconds:.1f}", state]


def _download(runs: list[Training]) -> str:
    """The table as a file: a link that holds it."""
    if not runs:
        return ""
    data = base64.b64encode(frame_of(runs).to_csv(index=False).encode()).decode()
    return f'<a download="runs.csv" href="data:text/csv;base64,{data}">Download as CSV</a>'


def _picture(runs: list[Training]) -> str:
    iterations = max((run.config.iterations for run in runs), default=20)

    def draw(figure):
        accuracy, kl = figure.subplots(1, 2)
        draw_accuracy(accuracy, iterations)
        draw_kl(kl, iterations, max((row.get("kl", 0.0) for run in runs for row in run.history.rows), default=0.0))
        for number, run in enumerate(runs, 1):
            color, marker, _ = LOOKS[(number - 1) % len(LOOKS)]
            for axes, column in ((accuracy, "accuracy"), (kl, "kl")):
                x, y = curve(run.history.rows, column)
                axes.plot(x, y, marker=marker, color=color, markersize=4, linewidth=1.2)
                if x:
                    beside = {"xytext": (4, 4 if number % 2 else -4), "textcoords": "offset points", "va": "center"}
                    axes.annotate(str(number), (x[-1], y[-1]), color=color, fontsize=9, annotation_clip=True, **beside)

    ends = ", ".join(f"run {i} {run.accuracy}" for i, run in enumerate(runs, 1) if run.accuracy is not None)
    return figure_html(draw, f"Greedy accuracy and KL over iterations. At the end: {ends or 'no run yet'}", size=(8.6, 2.8))


def recorded_runs() -> list[Training]:
    """The runs of RECORDED, as if they had just finished."""
    runs = []
    for beta, (right, kls, seconds) in RECORDED.items():
        run = Training(GRPOConfig(beta=beta, evaluate_on="validation"))
        for iteration, successes, kl in zip(range(0, 21, 5), right, kls):
            accuracy = proportion(successes, 400)
            row = {"iteration": iteration, "seconds": seconds / len(right), "accuracy": accuracy.value}
            row |= {"accuracy_low": accuracy.low, "accuracy_high": accuracy.high} | ({} if kl is None else {"kl": kl})
            run.history.rows.append(row)
        run.state = "finished"
        runs.append(run)
    return runs
