"""What nbval would accept in silence, and we do not: notebooks that are run but not compared.

nbval compares nothing in a cell that was saved without having been run, so a notebook with cleared outputs passes. It
skips what a tag or a comment tells it to skip, and it ignores widget state. Each function here returns the faults that it
finds, in words.
"""

import ast
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

SILENCERS = re.compile(r"(?mi)^\s*#+\s*(nbval_(skip|ignore_output|raises_exception)|pytest_validate_ignore_output)\s*$")
MACHINE = re.compile(r"(?<![\w.])(/(home|root|Users|tmp|var|work|usr)/|[A-Z]:\\)\w")
WIDGET = "application/vnd.jupyter.widget-view+json"


def faults(path: Path) -> list[str]:
    """All that would make a green nbval run of this notebook mean less than it seems."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = _faults_of_file(notebook, code)
    for number, cell in enumerate(code):
        found += [f"code cell {number}: {fault}" for fault in _faults_of_cell(cell)]
    return [f"{path.name}: {fault}" for fault in found]


def _faults_of_file(notebook: NotebookNode, code: list[NotebookNode]) -> list[str]:
    found = []
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"not run top to bottom in a fresh kernel (execution counts {counts}): run notebooks/build.py")
    if "widgets" in notebook.metadata:
        found.append("widget state is saved (metadata.widgets): run notebooks/build.py")
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        found.append(f"the kernelspec is {kernel!r}, not 'python3', which every reader has")
    return found


def _faults_of_cell(cell: NotebookNode) -> list[str]:
    found, tags = [], cell.metadata.get("tags", [])
    if "nbval-skip" in tags:
        found.append("nbval-skip: a cell that is never run proves nothing")
    if SILENCERS.search(cell.source):
        found.append("a comment turns nbval off; use a tag, which readers do not have to read")
    if any(output.output_type == "error" for output in cell.outputs) != ("raises-exception" in tags):
        found.append("an error is saved exactly where the tag raises-exception says so, and nowhere else")
    if any(output.get("name") == "stderr" for output in cell.outputs):
        found.append("stderr is saved: a warning, or a progress bar")
    if any(WIDGET in output.get("data", {}) for output in cell.outputs):
        found.append("a widget is saved without its static twin: readers on GitHub would see an error")
    if MACHINE.search(_text(cell.outputs)):
        found.append("an output names a folder of the machine that made it")
    if "nbval-ignore-output" in tags:
        found += _faults_of_ignored(cell)
    return found


def _faults_of_ignored(cell: NotebookNode) -> list[str]:
    """A cell may go uncompared if it says why and asserts its claim itself, or if it only shows a picture or a widget."""
    if cell.outputs and all(_is_picture(output) for output in cell.outputs):
        return []
    found = []
    if "#" not in cell.source:
        found.append("nbval-ignore-output without a comment that says why")
    if not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(_python(cell.source)))):
        found.append("nbval-ignore-output without an assert: nothing is checked")
    return found


def _text(outputs: list[NotebookNode]) -> str:
    """What the outputs say, without the bytes of pictures."""
    said = []
    for output in outputs:
        data = output.get("data", {})
        said += [output.get("text", ""), *output.get("traceback", []), data.get("text/plain", ""), data.get("text/html", "")]
    return re.sub(r"base64,[^\"]*", "", "\n".join(said))


def _is_picture(output: NotebookNode) -> bool:
    data = output.get("data", {})
    return "image/png" in data or "<img" in data.get("text/html", "")


def _python(source: str) -> str:
    """The cell without IPython's own lines."""
    return "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
