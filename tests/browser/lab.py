"""A JupyterLab server of its own, and a notebook page in it that a test can read and touch.

Everything is looked for where a reader sees it: in the outputs, by the name on a button, by the text beside it.
"""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
SETTINGS = {  # No news, all cells in the page.
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
# The indicator is idle, too, before there is a kernel; so its name is asked for as well.
READY = """() => {
    const name = document.querySelector('.jp-Toolbar-kernelName')
    const state = document.querySelector('.jp-Notebook-ExecutionIndicator')
    return name && state && !/No Kernel/.test(name.textContent) && state.dataset.status === 'idle'
}"""
DONE = """() => {
    const cells = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')]
        .filter(cell => cell.querySelector('.cm-content').textContent.trim())
    return cells.length && cells.every(
        cell => /^\\[\\d+\\]:?$/.test(cell.querySelector('.jp-InputPrompt').textContent.trim()))
}"""
OUTPUT = ".jp-Cell-outputArea"  # Only here: the source of a cell contains the same words.


class Server:
    """JupyterLab on loopback, with folders of its own, so that neither finds nor leaves anything in the user's."""

    def __init__(self, root: Path, scratch: Path):
        for plugin, values in SETTINGS.items():
            file = scratch / "settings" / f"{plugin}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values), encoding="utf-8")
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        self.url, self.token = f"http://127.0.0.1:{_free_port()}", secrets.token_hex()
        self.log = scratch / "server.log"
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
                   f"--port={self.url.rsplit(':', 1)[1]}", "--ServerApp.port_retries=0",
                   f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={root}"]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {name: str(scratch / folder) for name, folder in folders.items()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait()

    def _wait(self) -> None:
        for _ in range(240):
            try:
                self.request("status")
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.25)
        raise TimeoutError(self.log.read_text())

    def request(self, path: str, method: str = "GET") -> bytes:
        headers = {"Authorization": f"token {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/api/{path}", headers=headers, method=method)) as reply:
            return reply.read()

    def close_kernels(self) -> None:
        """One kernel at a time: each has torch in its memory."""
        for session in json.loads(self.request("sessions")):
            self.request(f"sessions/{session['id']}", "DELETE")

    def close(self) -> None:
        self.close_kernels()
        self.process.terminate()
        self.process.wait(20)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Notebook:
    """A page of JupyterLab with one notebook open."""

    def __init__(self, page, server: Server, name: str):
        self.page, self.url, self.errors = page, f"{server.url}/doc/tree/{name}?token={server.token}", []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.open()

    def open(self) -> None:
        self.page.goto(self.url, wait_until="domcontentloaded")
        self.page.wait_for_function(READY, timeout=60_000)

    def menu(self, *path: str) -> None:
        for name in path:
            self.page.get_by_role("menuitem", name=name, exact=True).click()

    def run_all(self) -> None:
        self.menu("Run", "Run All Cells")
        self.page.wait_for_function(DONE, timeout=300_000)
        self.assert_healthy()

    def assert_static_twins(self) -> None:
        """Before anything is run: no dead widget, and every picture has come and says what it shows."""
        outputs = self.page.locator(f".jp-Notebook {OUTPUT}")
        assert "Error displaying widget" not in " ".join(outputs.all_inner_texts())
        assert outputs.locator(".widget-vbox").count() == 0
        pictures = outputs.locator("img[alt]").all()
        assert pictures, "no picture is seen before the notebook is run"
        for picture in pictures:
            assert picture.evaluate("image => image.complete && image.naturalWidth > 100")

    def assert_healthy(self) -> None:
        """No error in the page, in the console, or from the kernel."""
        assert not self.errors, self.errors
        for kind in ("stderr", "error"):
            said = self.page.locator(f'{OUTPUT} [data-mime-type="application/vnd.jupyter.{kind}"]').all_inner_texts()
            assert not said, said

    def cell(self, source: str | re.Pattern) -> "Cell":
        """The code cell with these words in its source."""
        found = self.page.locator(".jp-Notebook .jp-CodeCell").filter(has=self.page.locator(".cm-content", has_text=source))
        return Cell(self, found.first)


class Cell:
    """A code cell with its output: what a reader sees and touches there."""

    def __init__(self, notebook: Notebook, element):
        self.notebook, self.element, self.page = notebook, element, notebook.page
        self.output = element.locator(OUTPUT)

    def text(self) -> str:
        return self.output.inner_text()

    def run(self) -> None:
        """Select the cell and press Shift+Enter, as a reader does."""
        self.element.locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_function(DONE, timeout=300_000)

    def sees(self, words, seconds: float = 10) -> None:
        """Wait until the output shows the words (a string or a regular expression)."""
        from playwright.sync_api import expect  # Here, so that this file can be imported where there is no playwright.

        expect(self.output).to_contain_text(words, use_inner_text=True, timeout=1000 * seconds)

    def changes(self, before: str) -> None:
        """Wait until the output shows something else than before."""
        from playwright.sync_api import expect

        expect(self.output).not_to_have_text(before, use_inner_text=True)

    def button(self, name: str):
        return self.output.get_by_role("button", name=name, exact=True)

    def click(self, button: str) -> None:
        self.button(button).click()

    def slide(self, name: str, key: str, times: int = 1) -> None:
        """Press an arrow key on a slider."""
        self.control(name).locator(".noUi-handle").focus()
        for _ in range(times):
            self.page.keyboard.press(key)

    def drag(self, name: str, to: float) -> None:
        """Drag a slider's handle with the mouse to a share of its length."""
        self.control(name).scroll_into_view_if_needed()
        handle, base = (self.control(name).locator(part).bounding_box() for part in (".noUi-handle", ".noUi-base"))
        self.page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
        self.page.mouse.down()
        self.page.mouse.move(base["x"] + to * base["width"], base["y"] + base["height"] / 2, steps=10)
        self.page.mouse.up()

    def type(self, name: str, text: str) -> None:
        box = self.control(name).locator("input, textarea")
        box.fill(text)
        box.press("Enter")

    def choose(self, name: str, option: str) -> None:
        self.control(name).locator("select").select_option(label=option)

    def control(self, name: str):
        """The widget with this text beside it."""
        label = self.page.locator(".widget-label", has_text=re.compile(f"^{re.escape(name)}$"))
        return self.output.locator(".widget-inline-hbox, .widget-inline-vbox").filter(has=label).first

    def height(self) -> float:
        return self.output.locator(".widget-vbox").first.bounding_box()["height"]

    def screenshot(self, file: Path) -> None:
        self.element.scroll_into_view_if_needed()
        self.output.locator(".widget-vbox").first.screenshot(path=file)
