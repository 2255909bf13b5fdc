"""MemoryExplorer: every number is that of `memory` for the chosen setting, in words, in the picture and in the saved table."""

import html
import re

import pytest

pytest.importorskip("transformers", reason='needs pip install -e ".[real]"')

from matplotlib.figure import Figure

from grpo_core.bridge.scale import MODELS, gpus_needed, memory, peak
from grpo_core.lab import memory_explorer, panel
from grpo_core.lab.memory_explorer import LOOKS, METHODS, NAMES, TRAINED, MemoryExplorer, draw_memory, gigabytes


@pytest.fixture(autouse=True)
def drawings(monkeypatch):
    """Pictures are kept as functions: drawing each one would take most of the time of these tests."""
    kept = []
    monkeypatch.setattr(
        memory_explorer, "figure_html", lambda draw, alt, size: kept.append(draw) or f'<img alt="{html.escape(alt)}">'
    )
    return kept


@pytest.fixture
def explorer():
    made = MemoryExplorer()
    yield made
    made.close()


def choose(explorer, model, trained, method, rows):
    explorer.model.value, explorer.trained.value, explorer.method.value, explorer.rows.value = model, trained, method, rows
    critic, leash = {"GRPO with a leash": (0, 1), "GRPO, beta 0": (0, 0), "PPO with a critic and a leash": (1, 1)}[method]
    return memory(model, "lora" if "LoRA" in trained else "all", bool(critic), bool(leash), rows=rows)


SETTINGS = [
    ("Qwen2.5-0.5B", "all weights", "GRPO, beta 0", 64),
    ("Qwen2.5-7B", "LoRA, rank 16", "PPO with a critic and a leash", 1),
    ("Qwen2.5-72B", "all weights", "PPO with a critic and a leash", 512),
    ("Qwen2.5-72B", "LoRA, rank 16", "GRPO with a leash", 8),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_story_and_alternative_text_tell_the_chosen_setting(explorer, setting):
    frame = choose(explorer, *setting)
    shown, parts = explorer.html.value, frame["GB"]
    held = frame[frame["when"] == "always"]["GB"].sum()
    gpus = gpus_needed(peak(frame))
    assert f"<b>{setting[0]}</b>, {setting[1]} trained, {setting[2]}: <b>{gigabytes(held)} GB</b>" in shown
    assert f"With {setting[3]} rows of 1000 tokens, sampling adds {gigabytes(parts['cache'])} GB" in shown
    assert f"an update {gigabytes(parts['logits'])} GB of logits. At the peak {gigabytes(peak(frame))} GB" in shown
    assert f"at least <b>{gpus} GPU{'s' if gpus > 1 else ''}</b> of 80 GB" in shown
    for part, value in parts.items():
        assert (f"{NAMES[part]} {gigabytes(value)}" in shown) == (value > 0), part


def test_a_critic_is_named_whether_it_is_there_or_not(explorer):
    frame = choose(explorer, "Qwen2.5-7B", "all weights", "PPO with a critic and a leash", 8)
    critic = gigabytes(frame["GB"]["critic"])
    assert f"The critic is {critic} GB of it." in explorer.html.value
    explorer.method.value = "GRPO, beta 0"
    assert f"A critic would add {critic} GB." in explorer.html.value


@pytest.mark.parametrize("setting", SETTINGS)
def test_bars_end_where_the_sums_do_and_lines_are_80_gb_apart(explorer, drawings, setting):
    frame = choose(explorer, *setting)
    figure = Figure()
    drawings[-1](figure)
    (axes,) = figure.axes
    state = frame["GB"][:5].sum()
    ends = {label.get_text().split()[-1]: 0.0 for label in axes.get_yticklabels()}
    for bar in axes.patches:
        moment = axes.get_yticklabels()[round(bar.get_y() + bar.get_height() / 2)].get_text().split()[-1]
        assert bar.get_x() == pytest.approx(ends[moment]), "each part begins where the last one ended"
        ends[moment] = bar.get_x() + bar.get_width()
    assert ends == pytest.approx({"sampling": state + frame["GB"]["cache"], "updating": state + frame["GB"]["logits"]})
    lines = [segment[0][0] for segment in axes.collections[0].get_segments()]
    assert lines == pytest.approx([80 * k for k in range(1, len(lines) + 1)]) and lines[-1] + 80 > axes.get_xlim()[1]
    assert axes.get_xlim()[1] >= max(peak(frame), 80)


def test_parts_are_told_apart_without_color(explorer):
    figure = Figure()
    draw_memory(figure, choose(explorer, *SETTINGS[2]))
    (legend,) = figure.legends
    hatches = [(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()]
    assert len(set(hatches)) == len(hatches) == len(LOOKS)
    assert [text.get_text().rsplit(" ", 1)[0] for text in legend.get_texts()] == list(NAMES.values())


def test_the_picture_is_a_picture(explorer, monkeypatch):
    monkeypatch.setattr(memory_explorer, "figure_html", panel.figure_html)
    explorer.method.value = "GRPO, beta 0"
    assert re.search(
        r'<img alt="Bars of gigabytes[^"]+" width="826" height="\d+" src="data:image/png;base64,\w+', explorer.html.value
    )


def test_the_saved_page_has_every_model_trained_in_each_way_by_each_method(explorer):
    saved = explorer._repr_mimebundle_()[0]["text/html"]
    rows = [re.findall("<td><span>(.*?)</span></td>", row) for row in re.findall("<tr>(.*?)</tr>", saved)[1:]]
    assert [tuple(row[:3]) for row in rows] == [(m, t, how) for m in MODELS for t in TRAINED for how in METHODS]
    for model, trained, method, *cells in rows:
        frame = choose(explorer, model, trained, method, 8)
        numbers = [gigabytes(value) for value in [*frame["GB"], peak(frame)]]
        assert cells == [*numbers, str(gpus_needed(peak(frame)))]
