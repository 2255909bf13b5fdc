"""One server for all browser tests, a fresh page for each.

Without Chromium or playwright the tests are skipped, in words; on Linux, where CI is set, they fail instead, so that they
cannot be skipped for ever without anybody noticing. PICTURES=folder keeps pictures of the widgets.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from .lab import ARGUMENTS, Notebook, Server

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _missing(what: str):
    message = f"no {what}: the notebooks are not tried in a real browser"
    required = os.environ.get("CI") and sys.platform == "linux"
    (pytest.fail if required else pytest.skip)(message)


@pytest.fixture(scope="session")
def browser():
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        _missing("Chromium on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing('playwright (pip install -e ".[browser]")')
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory):
    """On a copy of the notebooks: JupyterLab saves them by itself."""
    scratch = tmp_path_factory.mktemp("jupyter")
    root = shutil.copytree(NOTEBOOKS, scratch / "root", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copytree(NOTEBOOKS.parent / "outputs", scratch / "outputs")  # Notebooks read it as ../outputs.
    running = Server(root, scratch)
    yield running
    running.close()


@pytest.fixture
def open_notebook(browser, server):
    """Open a notebook by name; at the end, whatever the test did, nothing must have complained."""
    page = browser.new_page(viewport={"width": 1200, "height": 1500})
    opened = []

    def open_by_name(name):
        opened.append(Notebook(page, server, f"{name}.ipynb"))
        return opened[-1]

    yield open_by_name
    for notebook in opened:
        notebook.assert_healthy()
    page.close()
    server.close_kernels()


@pytest.fixture
def picture():
    """Keep a picture of a cell's widget under this name, if somebody asked for pictures."""
    folder = os.environ.get("PICTURES")

    def keep(cell, name):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            cell.screenshot(Path(folder) / f"{name}.png")

    return keep
