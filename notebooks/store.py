"""Run notebooks and store what they printed and drew, so that a code host shows them unrun.

    python notebooks/store.py 00-start-here.ipynb ...      (without names: all of them)

Needs what the course needs, and kaleido with a Chrome or Chromium for the pictures; where Pillow is installed, they
are stored with a palette where that looks the same, two thirds smaller. Run it on an otherwise idle machine: the
timings are stored. Widgets are not stored (their state would embed megabytes of script and no code host shows it); each
is followed by a still figure, and a line in its place says so. A cell that fails or writes to stderr stops it, and
nothing is stored. The first cell's "Stored figures" line is filled in with what the set-up cell printed.
"""

from __future__ import annotations

import base64
import html
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SECONDS = 300  # a cell
SAID, FEW = 400, 8  # characters of a figure in words; bars that are all named
UNSEEN = 12  # levels, of 255 a colour
WIDGET = "application/vnd.jupyter.widget-view+json"
FIGURE = "application/vnd.plotly.v1+json"
MOVES = "*In JupyterLab there is something to move here; below, one of its positions.*"
STAMP = re.compile(r"(?m)^(.*\*\*Stored figures:\*\*).*$")
MACHINE = re.compile(r"(?m)^This machine: (.+)$")


def store(path: Path) -> str:
    """Run one notebook and write it back; returns a line about it. A cell that fails raises, and nothing is written."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as empty:  # without what another notebook, or a reader, left in my-kernels
        where = {"metadata": {"path": empty}}
        NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, resources=where).execute()
    seconds = time.perf_counter() - start
    tidy(notebook)
    for output in (each for cell in notebook.cells for each in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = smaller(output.data["image/png"])
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return f"{path.name}: {seconds:.0f} s, {path.stat().st_size / 1e6:.2f} MB"


def smaller(picture: str) -> str:
    """A PNG in base64 without its transparency, and with a palette where no pixel is more than UNSEEN off; as it was
    where Pillow is missing."""
    try:
        from PIL import Image, ImageChops
    except ModuleNotFoundError:
        return picture
    opaque = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    colours = opaque.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    off = max(most for _, most in ImageChops.difference(opaque, colours.convert("RGB")).getextrema())
    stored = io.BytesIO()
    (colours if off <= UNSEEN else opaque).save(stored, "PNG", optimize=True)
    return min(picture, base64.b64encode(stored.getvalue()).decode(), key=len)


def in_words(figure: dict) -> str:
    """A figure for those who cannot see its picture: its title, its panels, what is drawn, from where to where, the
    axes, and what else the title says; as much of it as goes into SAID characters."""
    layout = figure.get("layout", {})
    title, *more = lines_of(layout.get("title", {}).get("text")) or [""]
    notes = [
        line
        for each in layout.get("annotations") or []
        if each.get("xref") == each.get("yref") == "paper"  # others stand at a value
        for line in lines_of(each.get("text"))[:1]
    ]
    axes = [
        axis.get("title", {}).get("text") for name, axis in sorted(layout.items()) if name[:5] in ("xaxis", "yaxis")
    ]
    drawn = [drawn_in_words(trace) for trace in figure.get("data", [])]
    parts = (
        ("", [title]),
        ("panels: " if title else "", dict.fromkeys(notes[:6])),
        ("drawn: ", dict.fromkeys(drawn)),
        ("axes: ", dict.fromkeys(line for each in axes for line in lines_of(each))),
        ("", more),
    )
    said = "; ".join(what + ", ".join(filter(None, some)) for what, some in parts if any(some))
    return said if len(said) <= SAID else re.sub(r"[,;][^,;]*$", "", said[:SAID])


def lines_of(text: str | None) -> list[str]:
    """The lines of a title of Plotly's, without its tags."""
    text = re.sub(r"(?<=\d)<sup>(-?\d+)</sup>", r"^\1", text or "")
    lines = (html.unescape(re.sub("<[^>]*>", " ", line)) for line in text.split("<br>"))
    return [line for line in (" ".join(each.split()) for each in lines) if line]


def drawn_in_words(trace: dict) -> str:
    """A curve's or bars' name with the first and the last value and their places, all values of a few bars or points
    that have no name; "" for what has neither."""
    name = ", ".join(lines_of(trace.get("name")))
    x, y = trace.get("x") or [], trace.get("y") or []
    pairs = zip(y, x) if trace.get("orientation") == "h" else zip(x, y)
    numbers = [f"{short(value)} at {short(place)}" for place, value in pairs if isinstance(value, (int, float))]
    apart = trace.get("type") == "bar" or trace.get("mode") == "markers"
    if apart and not name and len(numbers) <= FEW:
        return ", ".join(numbers)
    if not name or not numbers or trace.get("type") not in ("bar", "scatter"):
        return name
    return f"{name} {' to '.join(dict.fromkeys((numbers[0], numbers[-1])))}"


def short(value) -> str:
    """A number with three digits, a name as it is."""
    if not isinstance(value, (int, float)):
        return " ".join(lines_of(str(value)))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def tidy(notebook) -> None:
    """Take out what must not be stored, and stamp the first cell with the machine the set-up cell named."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    printed = ""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if WIDGET in output.get("data", {}):
                output.data, output.metadata = {"text/markdown": MOVES, "text/plain": MOVES.strip("*")}, {}
        merge_streams(cell)
        for output in cell.outputs:
            if FIGURE in output.get("data", {}) and "image/png" not in output.data:
                raise RuntimeError(f"no picture of the figure in this cell:\n{cell.source}")
            if FIGURE in output.get("data", {}):
                output.data.pop("text/plain", None)  # its data once more
                output.metadata["image/png"] = {"alt": in_words(output.data[FIGURE])}
            if output.output_type == "stream" and output.name == "stderr":
                raise RuntimeError(f"this cell complains:\n{cell.source}\n\n{output.text}")
            if output.output_type == "stream" and output.name == "stdout":
                printed += output.text
    machine = MACHINE.search(printed)
    first = notebook.cells[0]
    if machine is None or not STAMP.search(first.source):
        raise RuntimeError("the set-up cell names no machine, or the first cell has no '**Stored figures:**' line")
    first.source = STAMP.sub(lambda line: f"{line[1]} {machine[1]}", first.source)


def merge_streams(cell) -> None:
    """Join pieces of one stream that follow each other: where a flush fell is chance."""
    merged = []
    for output in cell.outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    cell.outputs = merged


def with_code() -> list[Path]:
    """All notebooks but those that are words alone."""
    return sorted(path for path in FOLDER.glob("*.ipynb") if '"cell_type": "code"' in path.read_text(encoding="utf-8"))


def main(names: list[str]) -> None:
    os.environ["TWELL_LAB_STORE"] = "1"
    for path in [FOLDER / name for name in names] or with_code():
        print(store(path), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
