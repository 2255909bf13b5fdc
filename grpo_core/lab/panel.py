"""One family of widgets: controls above, one HTML area below, and a static twin in the saved notebook.

Text and picture share a single HTML widget: with two, new text stands above an old picture for a moment, and with an
Output widget the cell's height jumps. The static twin is what GitHub, nbviewer and a notebook that was not run show.
"""

import base64
import html
import io
import threading
from collections.abc import Callable

import ipywidgets as W
from IPython import get_ipython
from matplotlib.figure import Figure

BLUE, ORANGE, GRAY = "#0072b2", "#d55e00", "#767676"  # Told apart by every kind of color vision; a sign always goes along.
_DRAWING = threading.RLock()  # Callbacks may run on another thread than cells, and matplotlib's text cache is shared.


def figure_html(draw: Callable[[Figure], None], alt: str, size: tuple[float, float] = (6.4, 2.6)) -> str:
    """Draw on a figure that pyplot never sees; return an <img> with alternative text and a fixed size."""
    with _DRAWING:
        figure = Figure(figsize=size)
        width, height = size
        figure.subplots_adjust(left=0.7 / width, right=1 - 0.15 / width, bottom=0.5 / height, top=1 - 0.35 / height, wspace=0.3)
        draw(figure)  # Fixed margins: a layout engine takes 0.1 s, and the axes would jump from one move to the next.
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=96, metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    width, height = (round(96 * side) for side in size)
    return f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" src="data:image/png;base64,{data}">'


def table_html(header: list[str], rows: list[list[str]], marked: int | None = None) -> str:
    """A plain table. Cells are escaped; the marked row is bold and has an arrow, so that it needs no color."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in ["", *header])
    body = ""
    for i, row in enumerate(rows):
        tag, arrow = ("b", "▶") if i == marked else ("span", "&nbsp;&nbsp;")
        body += f"<tr><td>{arrow}</td>" + "".join(f"<td><{tag}>{html.escape(cell)}</{tag}></td>" for cell in row) + "</tr>"
    return f'<table style="border-spacing:10px 2px;font-variant-numeric:tabular-nums"><tr>{head}</tr>{body}</table>'


class Panel(W.VBox):
    """A widget with controls and one HTML area.

    A subclass makes its controls, passes them to `__init__`, and gives `view` and `static`. `refresh` shows `view` again.

    Args:
        rows: lists of controls, one list a row.
        height: of the HTML area in pixels, fixed, so that nothing below it moves.
    """

    def __init__(self, rows: list[list[W.Widget]], height: int):
        self.html = W.HTML(layout=W.Layout(width="100%"))
        self._height = height
        self._refreshing = threading.RLock()
        wrap = W.Layout(flex_flow="row wrap", align_items="center")
        super().__init__([*(W.HBox(row, layout=wrap) for row in rows), self.html])
        _close_previous(self)
        self.refresh()

    def view(self) -> str:
        """HTML for the present state of the controls."""
        raise NotImplementedError

    def static(self) -> str:
        """HTML of the whole story, legible without style sheets: for readers without a kernel."""
        return self.view()

    def refresh(self, *_) -> None:
        """Show the present view. The lock keeps a slower thread from showing an older one afterwards."""
        with self._refreshing:
            try:
                self._show(self.view())
            except ValueError as error:
                self.explain(str(error))

    def explain(self, problem: str) -> None:
        """Say why a setting is not possible, where the reader is looking."""
        self._show(f"<p><b>Not possible:</b> {html.escape(problem)}</p>")

    def _show(self, shown: str) -> None:
        """The status role lets screen readers say what changed."""
        style = f"min-height:{self._height}px;line-height:1.5"
        self.html.value = f'<div role="status" aria-live="polite" style="{style}">{shown}</div>'

    def close(self) -> None:
        """Also close the controls; a view that is gone must not keep answering."""
        for widget in _tree(self):
            widget.unobserve_all()
            if widget is not self:
                widget.close()
        super().close()

    def _repr_mimebundle_(self, **arguments):
        bundle = super()._repr_mimebundle_(**arguments)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/plain": f"<{type(self).__name__}>", "text/html": self.static()}, metadata


def _tree(widget: W.Widget) -> list[W.Widget]:
    """A widget and all that it is made of; layouts and styles are widgets, too, and live in the page like the others."""
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    parts = [part for part in parts if isinstance(part, W.Widget)]
    return [widget, *parts, *(part for child in getattr(widget, "children", ()) for part in _tree(child))]


_OPEN: dict[str, tuple[str, list[Panel]]] = {}


def _close_previous(panel: Panel) -> None:
    """Running a cell again replaces its panels; the old ones are closed, or they would answer forever."""
    shell = get_ipython()
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell, run = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
    if cell is None:
        return
    former_run, panels = _OPEN.get(cell, (run, []))
    if former_run != run:
        for former in panels:
            former.close()
        panels = []
    _OPEN[cell] = run, [*panels, panel]


def button(text: str, on_click: Callable[[], None], tooltip: str = "") -> W.Button:
    """A button with its name in words."""
    control = W.Button(description=text, tooltip=tooltip or text, layout=W.Layout(width="auto"))
    control.on_click(lambda _: on_click())
    return control
