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
    folder = Path(_made[-1].name)
    for each in (core.kernels_dir() / file, *_STAND_INS.glob("*.cuh")):
        shutil.copy(each, folder)
    return folder / file
