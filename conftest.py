"""Notebooks are tests: nbval runs each cell and compares its output with the saved one.

After the last cell the kernel must not have grown beyond what a small laptop can spare. And readers go back, and run cells
twice: so each notebook is run again in the same kernel, forward and then backward, and must raise nothing new. (Cells tagged
slow, which train for many seconds, run forward once only.)
"""

from collections import defaultdict
from importlib.util import find_spec

import pytest
from nbformat.v4 import new_code_cell
from nbval.plugin import IPyNbCell

from tests.notebook_guard import faults

collect_ignore = ["notebooks/build.py"]  # A script without doctests, and others have a module of that name.
if find_spec("transformers") is None:  # An extra: pip install -e ".[real]"
    collect_ignore_glob = ["grpo_core/bridge/*", "grpo_core/studies/*real*", "grpo_core/studies/*trl*", "notebooks/09*"]

MOST = {"09_real_models.ipynb": 1200}  # MB; TRL and what it imports take half of that.
MEMORY = """
import psutil
memory = psutil.Process().memory_info().rss / 2**20
assert memory < {most}, f"the kernel has {{memory:.0f}} MB"
"""


def pytest_configure(config):
    """nbval looks for this file from where pytest was started; the tests may be started from anywhere."""
    config.option.nbval_sanitize_with = str(config.rootpath / "tests/nbval_sanitize.cfg")


def pytest_collection_modifyitems(items):
    notebooks = defaultdict(list)
    for item in items:
        if isinstance(item, IPyNbCell):
            notebooks[item.parent].append(item)
    found = [fault for notebook in notebooks for fault in faults(notebook.path)]
    if found:
        raise pytest.UsageError("\n".join(["nbval would pass for nothing:", *found]))
    for notebook, cells in notebooks.items():
        if len(cells) == sum(cell.cell_type == "code" for cell in notebook.nb.cells):
            after = items.index(cells[-1]) + 1
            items[after:after] = _again(notebook, cells)
    for item in items:
        if isinstance(item, IPyNbCell):
            item.output_timeout = 60  # nbval gives up after 5 s, too few on a busy machine.


def _again(notebook, cells):
    """The memory; each cell once more, without comparison; then backward, but for the cells that train."""

    def item(name, number, cell, options):
        options = defaultdict(bool, {**options, "check": False})
        return IPyNbCell.from_parent(notebook, name=name, cell_num=number, cell=cell, options=options)

    def without(tag):
        return [cell for cell in cells if tag not in cell.cell.metadata.get("tags", [])]

    return [
        item("memory", len(cells), new_code_cell(MEMORY.format(most=MOST.get(notebook.path.name, 600))), {}),
        *(item(f"{cell.name}, again", cell.cell_num, cell.cell, cell.options) for cell in without("slow")),
        *(
            item(f"{cell.name}, backward", cell.cell_num, cell.cell, cell.options)
            for cell in reversed(without("nbval-ignore-output"))
        ),
    ]
