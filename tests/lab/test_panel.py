"""The family of widgets: one HTML area, a static twin, no leaks, right on any thread."""

import re
import struct
import threading
from base64 import b64decode
from types import SimpleNamespace

import ipywidgets as W
import pytest
from ipywidgets.widgets import widget as registry

from grpo_core.lab import panel
from grpo_core.lab.panel import Panel, button, figure_html, table_html


class Counter(Panel):
    """The smallest panel: one slider, shown as text."""

    def __init__(self):
        self.slider = W.IntSlider(value=1, min=0, max=9)
        self.reset = button("Reset", lambda: self.slider.set_trait("value", 0), "back to zero")
        self.slider.observe(self.refresh, "value")
        super().__init__([[self.slider], [self.reset]], height=120)

    def view(self):
        if self.slider.value == 7:
            raise ValueError("7 < 8 & no")
        return f"<p>now {self.slider.value}</p>"


@pytest.fixture
def cell(monkeypatch):
    """Pretend to be in a notebook: cell(id, run) is a run of the cell with that id."""
    parent = {}
    monkeypatch.setattr(panel, "get_ipython", lambda: SimpleNamespace(get_parent=lambda: parent))
    monkeypatch.setattr(panel, "_OPEN", {})

    def run(cell_id, run_id):
        parent.update(metadata={"cellId": cell_id}, header={"msg_id": run_id})

    return run


def test_shows_its_view_and_follows_its_controls():
    counter = Counter()
    assert "now 1" in counter.html.value
    counter.slider.value = 5
    assert "now 5" in counter.html.value
    counter.reset.click()
    assert "now 0" in counter.html.value


def test_the_area_tells_screen_readers_of_changes_and_keeps_its_height():
    assert re.match(r'<div role="status" aria-live="polite" style="min-height:120px;', Counter().html.value)


def test_an_impossible_setting_is_explained_and_left_again():
    counter = Counter()
    counter.slider.value = 7
    assert "<b>Not possible:</b> 7 &lt; 8 &amp; no" in counter.html.value
    assert "min-height:120px" in counter.html.value
    counter.slider.value = 6
    assert "now 6" in counter.html.value


def test_each_button_has_a_name_and_a_tooltip():
    assert (Counter().reset.description, Counter().reset.tooltip) == ("Reset", "back to zero")


def test_is_saved_with_a_static_twin():
    bundle, _ = Counter()._repr_mimebundle_()
    assert bundle["text/plain"] == "<Counter>"
    assert bundle["text/html"] == "<p>now 1</p>"
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_works_on_another_thread():
    counter = Counter()
    threads = [threading.Thread(target=counter.slider.set_trait, args=("value", k)) for k in range(2, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert f"now {counter.slider.value}" in counter.html.value


def test_a_slow_view_of_an_older_value_does_not_come_last():
    """One thread is in the middle of drawing when another moves the slider."""
    inside, moved = threading.Event(), threading.Event()

    class Slow(Counter):
        def view(self):
            value = self.slider.value
            if value == 2:
                inside.set()
                moved.wait(0.5)
            return f"<p>now {value}</p>"

    slow = Slow()
    older = threading.Thread(target=slow.slider.set_trait, args=("value", 2))
    older.start()
    inside.wait()
    newer = threading.Thread(target=slow.slider.set_trait, args=("value", 3))
    newer.start()
    newer.join(0.1)
    moved.set()
    older.join()
    newer.join()
    assert "now 3" in slow.html.value


def test_running_a_cell_again_closes_its_panels(cell):
    cell("a", "run 1")
    first, second = Counter(), Counter()
    cell("b", "run 2")
    elsewhere = Counter()
    assert all(counter.comm for counter in (first, second, elsewhere)), "one cell may show two"
    cell("a", "run 3")
    third = Counter()
    assert first.comm is second.comm is first.slider.comm is None
    assert third.comm and elsewhere.comm


def test_a_closed_panel_answers_no_more(cell):
    cell("a", "run 1")
    first = Counter()
    shown = first.html.value
    cell("a", "run 2")
    Counter()
    first.slider.value = 9
    assert first.html.value == shown


def test_running_a_cell_again_leaves_nothing_behind(cell):
    """Controls, layouts and styles, too: each is an object in the kernel and in the page."""
    alive = []
    for run in range(4):
        cell("a", f"run {run}")
        Counter()
        alive.append(len(registry._instances))
    assert len(set(alive)) == 1


def test_outside_a_notebook_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(panel, "get_ipython", lambda: None)
    first = Counter()
    Counter()
    assert first.comm


def test_figure_has_alternative_text_and_the_size_it_says():
    html = figure_html(lambda figure: figure.add_subplot().plot([0, 1]), 'rise "<&', size=(4, 2))
    assert 'alt="rise &quot;&lt;&amp;"' in html
    assert 'width="384" height="192"' in html
    png = b64decode(re.search(r'base64,([^"]+)"', html)[1])
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (384, 192)


def test_the_same_figure_gives_the_same_bytes_on_every_thread():
    htmls = []
    draw = lambda figure: figure.add_subplot(title="t", xlabel="x").plot([0, 1, 0])  # noqa: E731
    threads = [threading.Thread(target=lambda: htmls.append(figure_html(draw, "a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(htmls) == 4
    assert len(set(htmls)) == 1


def test_table_escapes_its_cells_and_marks_a_row_without_color():
    html = table_html(["a<b"], [["<b>&"], ["plain"]], marked=1)
    assert "a&lt;b" in html
    assert "&lt;b&gt;&amp;" in html
    assert re.search(r"<tr><td>▶</td><td><b>plain</b></td></tr>", html)
    assert html.count("▶") == 1
