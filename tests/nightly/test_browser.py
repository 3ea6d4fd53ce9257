"""Notebooks in a real JupyterLab in a headless Chromium, their widgets moved by keyboard: `make test-browser`.

Notebook 00 runs whole; of the others, what their widgets need: the cells up to the still figure that follows the last.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHOLE = "00-start-here.ipynb"
SHOWN = "display(explorer)"  # the end of a cell that shows a widget
SECONDS = 300  # for all cells of a notebook
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PLACE = "handle => handle.parentElement.style.transform"  # of a slider's handle: its value is rounded to a digit
READY = """name => {
    const shown = window.jupyterapp?.shell.currentWidget;
    const kernel = shown?.context?.path === name && shown.sessionContext.session?.kernel;
    return kernel && kernel.connectionStatus === "connected" && kernel.status === "idle";
}"""
# Of the figure that a widget draws: all that is drawn, and its texts.
DRAWN = "figure => JSON.stringify([figure.data, figure.layout.title, figure.layout.annotations])"
FIGURE = "application/vnd.plotly.v1+json"


def cells(name: str) -> list[dict]:
    return json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]


def shows(name: str) -> list[int]:
    """Which cells of a notebook show a widget."""
    return [i for i, cell in enumerate(cells(name)) if "".join(cell["source"]).endswith(SHOWN)]


def still(name: str, shown: int) -> int:
    """The cell that draws the still figure of the widget that this one shows: the next one with a stored figure."""
    later = enumerate(cells(name)[shown + 1 :], shown + 1)
    return next(i for i, cell in later if any(FIGURE in each.get("data", {}) for each in cell.get("outputs", [])))


def with_a_widget() -> list[str]:
    return [name for name in sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")) if shows(name)]


def bare(name: str) -> dict:
    """The notebook without outputs and, if it is not WHOLE, without what follows its last widget's still figure."""
    kept = cells(name)
    if name != WHOLE:
        kept = kept[: still(name, shows(name)[-1]) + 1]
    for cell in kept:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": kept, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("needs a browser (Debian, Ubuntu: apt install chromium)")
    with driver.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """The address of a JupyterLab of its own, with settings of its own, in a folder of copies."""
    folder = tmp_path_factory.mktemp("lab")
    for name in with_a_widget():
        (folder / name).write_text(json.dumps(bare(name)), encoding="utf-8")
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')  # else cells out of sight are not in the page
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    environment = {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "PYTHONPATH": str(ROOT), **places}
    options = "--no-browser --allow-root --IdentityProvider.token= --expose-app-in-browser".split()
    command = [sys.executable, "-m", "jupyterlab", f"--port={port}", f"--notebook-dir={folder}", *options]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **environment}, cwd=folder, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            time.sleep(0.5)
            assert server.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5).close()
                break
            except OSError:
                continue
        yield address
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def opened(browser, lab):
    """opened(name) -> the page of the notebook, whose cells run."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(1000 * SECONDS)

    def run(name: str):
        page.goto(f"{lab}/lab/tree/{name}?reset")  # without the notebooks that were open before
        page.wait_for_function(READY, arg=name)
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        return page

    yield run
    page.close()


def changes(page, figure, before: str, key: str) -> bool:
    """Press a key, and wait until the figure is another one; False if it is not within four seconds."""
    page.keyboard.press(key)
    for _ in range(40):
        page.wait_for_timeout(100)
        if figure.evaluate(DRAWN) != before:
            return True
    return False


@pytest.mark.parametrize("name", with_a_widget())
def test_a_widget_is_moved_by_keyboard_and_its_figure_changes(opened, name):
    page = opened(name)
    page.locator(f".jp-Cell:nth-child({still(name, shows(name)[-1]) + 1}) .js-plotly-plot").wait_for()
    if name == WHOLE:  # its last cell has run
        page.wait_for_function(
            "() => /\\d/.test([...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].at(-1).innerText)"
        )
    errors = page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]')
    assert errors.count() == 0, errors.first.inner_text()
    for shown in shows(name):
        widget = page.locator(f".jp-Cell:nth-child({shown + 1}) .widget-vbox:has(.js-plotly-plot)").first
        handle, figure = widget.locator('[role="slider"]').first, widget.locator(".js-plotly-plot")
        handle.scroll_into_view_if_needed()
        before, at = figure.evaluate(DRAWN), handle.evaluate(PLACE)
        handle.focus()
        # One of them moves it wherever it stands.
        key = next((key for key in ("ArrowRight", "ArrowLeft") if changes(page, figure, before, key)), None)
        assert key is not None
        assert handle.evaluate(PLACE) != at
