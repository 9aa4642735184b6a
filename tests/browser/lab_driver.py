"""A real JupyterLab and a real Chromium for tests: a server with folders of its own, and pages that show a notebook.

with jupyterlab(folder) as server, chromium() as browser:
    page = open_notebook(server, browser, ["print(1)"])
    page.run(0)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nbformat
from playwright.sync_api import Browser, Error, Locator, Page, sync_playwright

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TOKEN = "token-of-a-test-server"
START_SECONDS = 120
Theme = Literal["light", "dark"]
_SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/apputils-extension/themes": {"theme": "JupyterLab Light"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    # Every cell stands in the page, wherever it is scrolled.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
_numbers = itertools.count(1)


@dataclass
class Server:
    """A running JupyterLab: its address and the folder whose notebooks it shows."""

    url: str
    root: Path

    def get(self, path: str) -> Any:
        """JSON of a GET of the server's own interface."""
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def delete(self, path: str) -> None:
        request = urllib.request.Request(
            f"{self.url}{path}", method="DELETE", headers={"Authorization": f"token {TOKEN}"}
        )
        urllib.request.urlopen(request, timeout=30).close()


@contextlib.contextmanager
def jupyterlab(folder: Path, *, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A JupyterLab that reads and writes nothing of the user's. A fresh `folder` trusts no notebook yet.

    `environment` adds variables for the server and its kernels.
    """
    root = folder / "notebooks"
    root.mkdir(parents=True, exist_ok=True)
    variables = {
        name: str(folder / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    variables["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    variables["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # Kernels import the package that the tests test, installed or not.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for name, values in _SETTINGS.items():
        file = folder / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser", "--allow-root"]
    # The server takes the first port that is free just then, and writes down which.
    command += ["--ip=127.0.0.1", "--ServerApp.port_retries=200", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={root}"]
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **variables, **(environment or {})}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield _wait_until_up(root, process, folder / "jupyter_runtime_dir", log)
        finally:
            _stop(process)


def _wait_until_up(root: Path, process: subprocess.Popen[bytes], runtime: Path, log: Path) -> Server:
    end = time.monotonic() + START_SECONDS
    written = runtime / f"jpserver-{process.pid}.json"
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            server = Server(f"http://127.0.0.1:{json.loads(written.read_text(encoding='utf-8'))['port']}", root)
            server.get("/api/status")
            return server
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # shuts the kernels down too
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium that calls nobody at home."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert program, f"none of {', '.join(BROWSERS)} is on PATH"
    # Containers often have a /dev/shm too small for a page's pictures; in /tmp there is room.
    quiet = "no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-background-networking disable-component-update"
    options = {
        "executable_path": program,
        "headless": True,
        "args": [f"--{flag}" for flag in (*quiet.split(), "disable-sync")],
    }
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(**options)
        except Error:
            # On a machine that is busy with other tests the first start, from a cold disk, may take too long.
            browser = playwright.chromium.launch(**options)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class LabPage:
    """A page that shows one notebook, and everything that the page did meanwhile.

    `outside` holds the addresses it asked for beyond its server, `errors` what its scripts threw, with their stacks,
    `frames` every frame that came over its WebSockets.
    """

    server: Server
    page: Page
    notebook: str
    shots: Path
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.server.root / self.notebook

    @property
    def own_errors(self) -> list[str]:
        """Errors thrown in a widget's module. JupyterLab throws some of its own when it starts on a busy machine."""
        return [error for error in self.errors if "blob:" in error]

    @property
    def cells(self) -> Locator:
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")

    def output(self, cell: int) -> Locator:
        """The output area of a cell."""
        return self.cells.nth(cell).locator(".jp-OutputArea").first

    def open(self, *, kernel: bool = True) -> None:
        """Load the notebook, in a workspace of its own; with `kernel` wait until one is connected and idle."""
        name = urllib.parse.quote(self.notebook)
        workspace = f"{Path(self.notebook).stem}-{next(_numbers)}"
        url = f"{self.server.url}/lab/workspaces/{workspace}/tree/{name}"
        self.page.goto(f"{url}?token={TOKEN}", wait_until="domcontentloaded")
        self._opened(kernel)

    def reload(self) -> None:
        """Load the page anew; the kernel lives on."""
        self.page.reload(wait_until="domcontentloaded")
        self._opened(kernel=True)

    def _opened(self, kernel: bool) -> None:
        self.cells.first.wait_for(timeout=1000 * START_SECONDS)
        if kernel:
            self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Wait until the server says that the kernel is connected and idle: the page says so too early."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            kernel = self._kernel()
            if kernel and kernel["connections"] >= 1 and kernel["execution_state"] == "idle":
                return
            self.page.wait_for_timeout(100)
        raise TimeoutError(f"the kernel of {self.notebook} was not idle after {START_SECONDS} s")

    def _kernel(self) -> dict[str, Any] | None:
        sessions = [s for s in self.server.get("/api/sessions") if s["path"] == self.notebook]
        return sessions[0]["kernel"] if sessions else None

    def start(self, cell: int) -> None:
        """Run a cell, and don't wait for its end."""
        self.cells.nth(cell).locator(".cm-content").first.click()
        self.page.keyboard.press("Shift+Enter")

    def run(self, cell: int, *, timeout_s: float = 60) -> None:
        """Run a cell and wait until it has ended."""
        before = self.prompt(cell)
        self.start(cell)
        self.wait_for_cell(cell, after=before, timeout_s=timeout_s)

    def prompt(self, cell: int) -> str:
        """`[3]:`, `[*]:` while it runs."""
        return (self.cells.nth(cell).locator(".jp-InputPrompt").first.text_content() or "").strip()

    def wait_for_cell(self, cell: int, *, after: str = "", timeout_s: float = 60) -> None:
        """Wait until a cell has ended; `after` is its prompt before the run."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            now = self.prompt(cell)
            if now != after and re.fullmatch(r"\[\d+\]:", now):
                return
            self.page.wait_for_timeout(50)
        raise TimeoutError(f"cell {cell} of {self.notebook} did not end in {timeout_s} s")

    def command(self, name: str, **arguments: Any) -> None:
        """Run one of JupyterLab's own commands, such as `notebook:restart-run-all`."""
        self.page.evaluate(
            "([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, dict(arguments)]
        )

    def theme(self, theme: Theme) -> None:
        """Switch the theme of the page that is shown, and wait until it is drawn."""
        light = "true" if theme == "light" else "false"
        if self.page.locator(f"body[data-jp-theme-light={light}]").count():
            return
        self.command("apputils:change-theme", theme=f"JupyterLab {theme.title()}")
        self.page.locator(f"body[data-jp-theme-light={light}]").wait_for(state="attached")
        # JupyterLab covers the page while it changes its colours.
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def save(self) -> None:
        """Write the notebook and wait until the file is there."""
        before = self.path.stat().st_mtime_ns
        # Ends when the server has written the file; a look at the file alone may find it half written.
        self.page.evaluate("window.jupyterapp.commands.execute('docmanager:save').then(() => null)")
        assert self.path.stat().st_mtime_ns != before, "the notebook was not saved"

    def shot(self, name: str, of: Locator | None = None) -> Path:
        """A picture of the page, or of one element, as `name.png` in the folder of screenshots."""
        file = self.shots / f"{name}.png"
        if of is None:
            self.page.screenshot(path=file)
            return file
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                of.screenshot(path=file)
            except Error as error:
                # A notebook may draw an output anew at any time; other actions of Playwright look again on their own.
                if "not attached" not in error.message or time.monotonic() > end:
                    raise
            else:
                return file

    def comm_messages(self, since: int = 0) -> list[bytes]:
        """The comm messages among the frames that came after the first `since`."""
        return [frame for frame in self.frames[since:] if message_type(frame).startswith("comm_")]

    def close(self) -> None:
        """Close the page and end its kernel."""
        self.page.context.close()
        kernel = self._kernel()
        if kernel:
            self.server.delete(f"/api/kernels/{kernel['id']}")


def message_type(frame: bytes) -> str:
    """The type of a kernel's message in a WebSocket frame; empty for other frames.

    A frame begins with the number of its parts and where each begins: channel, header, and so on.
    """
    if len(frame) < 32:
        return ""
    count, _, header, after = struct.unpack("<4Q", frame[:32])
    if not 2 < count < 100 or not header < after <= len(frame):
        return ""
    return str(json.loads(frame[header:after]).get("msg_type", ""))


def open_notebook(
    server: Server,
    browser: Browser,
    notebook: Sequence[str] | Path,
    *,
    shots: Path,
    theme: Theme = "light",
    kernel: bool = True,
    size: tuple[int, int] = (1400, 1000),
) -> LabPage:
    """Show a notebook: a list of cells' code, or a file that is copied into the server's folder.

    Args:
        kernel: wait for a kernel; without, the notebook is only looked at.
        size: of the window, in CSS pixels.
    """
    name = f"notebook-{next(_numbers)}.ipynb"
    if isinstance(notebook, Path):
        shutil.copy(notebook, server.root / name)
    else:
        content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in notebook])
        content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(content, server.root / name)
    context = browser.new_context(viewport={"width": size[0], "height": size[1]})
    page = context.new_page()
    page.set_default_timeout(30_000)
    lab = LabPage(server, page, name, shots)
    _listen(lab)
    lab.open(kernel=kernel)
    page.wait_for_function("window.jupyterapp !== undefined")
    lab.theme(theme)
    # More room for the notebook: the file browser says nothing here.
    if page.locator("#jp-left-stack:visible").count():
        lab.command("application:toggle-left-area")
    return lab


def _listen(lab: LabPage) -> None:
    def requested(request: Any) -> None:
        if not request.url.startswith((lab.server.url, "data:", "blob:", "about:")):
            lab.outside.append(request.url)

    def connected(socket: Any) -> None:
        socket.on(
            "framereceived", lambda frame: lab.frames.append(frame if isinstance(frame, bytes) else frame.encode())
        )

    lab.page.on("request", requested)
    lab.page.on("websocket", connected)
    lab.page.on("pageerror", lambda error: lab.errors.append(f"{error}\n{error.stack}"))
    lab.page.on("console", lambda message: lab.console.append(message.text) if message.type == "error" else None)
