"""How long a module tree of 2,000 modules takes to show in a real JupyterLab, and what it sends.

    python benchmarks/tree_paint.py [modules]

Needs the extra `test` and Chromium on PATH. Prints one line of JSON: the seconds from running the cell to rows in the
page (with the imports, and again without), the milliseconds of that in the page's own script, the messages and bytes,
and the environment.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))

from lab_driver import LabPage, chromium, jupyterlab, open_notebook
from tree_notebook import shown

ROWS_OF_A_BLOCK = 11
OTHER_ROWS = 7


def paint(lab: LabPage, cell: int) -> dict[str, Any]:
    """Run a cell that shows the tree, and say how long it took until its rows stood in the page."""
    before, start = len(lab.frames), time.perf_counter()
    lab.start(cell)
    rows = lab.output(cell).locator(".ait-body .ait-row")
    rows.first.wait_for(timeout=120_000)
    seconds = time.perf_counter() - start
    lab.page.wait_for_timeout(1000)
    messages = lab.comm_messages(before)
    script = lab.output(cell).locator("[data-paint-ms]").get_attribute("data-paint-ms")
    return {
        "seconds": round(seconds, 2),
        "script_ms": float(script or "nan"),
        "rows_in_page": rows.count(),
        "messages": len(messages),
        "bytes": sum(map(len, messages)),
    }


def main(modules: int) -> None:
    define, show = shown((modules - OTHER_ROWS) // ROWS_OF_A_BLOCK)
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder)) as server, chromium() as browser:
        lab = open_notebook(server, browser, [f"{define}\n{show}", show], shots=Path(folder))
        result = {"modules": modules, "first": paint(lab, 0), "again": paint(lab, 1), "chromium": browser.version}
        lab.close()
    for package in ("anywidget", "ipykernel", "jupyterlab"):
        result[package] = version(package)
    result["machine"] = platform.processor() or platform.machine()
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
