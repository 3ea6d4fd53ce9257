"""Kernels with PTX for the simulator, which cannot run it: with C++ in its place."""

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from twell_lab import core

_STAND_INS = Path(__file__).parent / "ptx"
_made: list[TemporaryDirectory] = []  # removed when the tests end


@cache
def without_ptx(file: str) -> Path:
    """A copy of kernels/`file` beside the headers that stand in for its PTX, which are found first."""
    _made.append(TemporaryDirectory())
    folder = put_stand_ins(Path(_made[-1].name))
    return Path(shutil.copy(core.kernels_dir() / file, folder))


def put_stand_ins(folder: Path) -> Path:
    """Copy the headers that stand in for PTX into a folder."""
    for header in _STAND_INS.glob("*.cuh"):
        shutil.copy(header, folder)
    return folder
