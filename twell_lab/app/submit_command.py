"""`twell-lab submit`: judges a kernel of the capstone as its notebook does, and writes a record that can be shared."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..core import check_folder
from .options import path
from .terminal import Answer


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=path, help="a CUDA source with the kernel down")
    parser.add_argument("--out", metavar="DIR", type=path, default=Path(), help="save the record here [this folder]")


def run(options: argparse.Namespace) -> Answer:
    """Judge the kernel in the simulator and, where there is one, on the GPU. Status 1, and no record, if it is not
    right."""
    from ..course import capstone

    check_folder(options.out)
    made = capstone.submit(options.file)
    lines = [f"submit: {line}" for line in (made.said, made.on_gpu) if line]
    if made.record is None:
        return Answer({"medal": None, "said": made.judged.said}, "\n".join(lines), status=1)
    saved = made.record.save(options.out)
    return Answer(made.record.to_json(), "\n".join([*lines, *_times(made.rows), f"submit: saved {saved}"]))


def _times(rows: list[dict]) -> list[str]:
    """A table of the times on the GPU; nothing without one."""
    from .. import records

    columns = {"path": "path", "ms": "ms", "spread": "spread", "device": "device", "tokens": "tokens"}
    return [records.table(rows, columns)] if rows else []
