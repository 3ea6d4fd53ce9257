"""The course walked by a machine: every notebook run from its first cell to its last, and timed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from .. import core
from ..core import StackError, TwellError

SECONDS = 120  # a cell may take


class Stumbled(TwellError, RuntimeError):
    """Cells of notebooks raised, took too long, or wrote to stderr."""


def walk(at_once: int = 1) -> list[dict]:
    """Run every notebook that has code, in the order of their names, in a kernel of its own and on a copy of itself in
    an empty folder, so that nothing is stored and no reader's work is touched. at_once: how many run beside each other;
    the times of several at once are those of a shared machine.

    Returns for each {path: its file name, ms: the time of all cells in milliseconds, cells: how many were run}. Raises
    Stumbled with every notebook in which a cell raised, was interrupted after SECONDS or wrote to stderr, and
    StackError where nbclient or a Python kernel is missing. What went wrong is said at once as well.
    """
    if missing := [name for name in ("nbclient", "nbformat", "ipykernel") if find_spec(name) is None]:
        raise StackError(f"{', '.join(missing)} not installed; `twell-lab doctor` says how to install the course")
    paths = sorted(core.notebooks_dir().glob("*.ipynb"))
    chosen = [path for path in paths if '"cell_type": "code"' in path.read_text(encoding="utf-8")]

    def run(path: Path) -> tuple[dict, str]:
        row, complaint = _run(path)
        said = f", stumbled: {complaint}" if complaint else ""
        print(f"{path.name}: {row['ms'] / 1e3:.0f} s{said}", file=sys.stderr, flush=True)
        return row, f"{path.name}: {complaint}" if complaint else ""

    if at_once == 1:  # in this thread, where an interruption ends the kernel
        found = [run(path) for path in chosen]
    else:
        with ThreadPoolExecutor(at_once) as several:
            found = list(several.map(run, chosen))
    rows, complaints = [row for row, _ in found], [complaint for _, complaint in found if complaint]
    if complaints:
        raise Stumbled("\n\n".join([f"{len(complaints)} of {len(rows)} notebooks stumbled", *complaints]))
    return rows


def _run(path: Path) -> tuple[dict, str]:
    """The row of one notebook, and what went wrong, in words, or nothing."""
    import nbformat
    from nbclient import NotebookClient

    notebook, wrong = nbformat.read(path, as_version=4), ""
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            interrupt_on_timeout=True,  # its traceback says where the cell was
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        # An Output widget is not imitated: that sends to the kernel by the socket on which the reply is awaited, and
        # where both meet, the reply is seen only when the time is up. What is drawn in one stands below the cell.
        client.comm_open_handlers["jupyter.widget"] = lambda message: None
        start = time.perf_counter()
        try:
            client.execute(env=environment)
        except Exception as error:  # a cell's, or of a kernel that died: the other notebooks are walked all the same
            wrong = f"{type(error).__name__}: {str(error)[-3000:]}"
        seconds = time.perf_counter() - start
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = [out.text for cell in code for out in cell.outputs if out.get("name") == "stderr"]
    row = {"path": path.name, "ms": 1e3 * seconds, "cells": len(code)}
    return row, wrong or (f"a cell wrote to stderr: {said[0][:1000]}" if said else "")
