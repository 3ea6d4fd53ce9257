"""Everything that the launchers compile, ahead of time: for machines without a compiler, and to fill a cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..core import folders
from ..core.errors import InputError
from ..cuda import cubins, launcher
from . import (
    ampere,
    decode,
    hopper_dense,
    hopper_pack,
    portable,
    train_columns,
    train_dense,
    train_lost,
    train_rows,
    transpose,
)

_THREADS = 8  # the compiler runs outside of Python's lock


def builds(arch: str, dtypes, d_models) -> list[tuple[str, str, tuple]]:
    """(file, architecture, macros) of every kernel that a GPU of `arch` may be asked for, for these values and
    widths."""
    number = int(arch.removeprefix("sm_"))
    found: list[tuple[str, tuple]] = []
    for dtype in dtypes:
        found += [("smxx_pack.cu", ((launcher._DEFINE[dtype], True),)), *train_dense.builds(dtype)]
        teams = (1, portable._TEAMS)
        widths = sorted({portable.specialisation(dtype, d, team) for d in d_models for team in teams} - {None}, key=str)
        for defines in (*widths, portable._any_width(dtype)):
            found += [("smxx_down.cu", defines), ("smxx_gated.cu", defines)]
        if dtype.itemsize != 2:
            continue
        for defines in widths:
            pooled = portable.POOLED_FILES[: 2 if "TEAMS" in dict(defines) else None]
            found += [(file, (*defines, *more.items())) for file, more in pooled]
        for width in d_models:
            found += train_rows.builds(dtype, width) if portable.pooled_takes(dtype, width) else []
        found += [*train_columns.builds([dtype]), *train_lost.builds(dtype), *transpose.builds(dtype)]
        if number >= 80:
            found += decode.builds(dtype, d_models)
        if number >= 80 or dtype == torch.float16:
            found.append(("sm80_gate_pack.cu", ampere.setup_for(divmod(number, 10)).defines(dtype)))
    if number == 90:
        short = [dtype for dtype in dtypes if dtype.itemsize == 2]
        found += [*hopper_pack.builds(short), *hopper_dense.builds(short)]
    target = lambda file: "sm_90a" if number == 90 and file.startswith("sm90_") else arch  # noqa: E731
    return [(file, target(file), defines) for file, defines in dict.fromkeys(found)]


def prebuild(
    folder: Path, architectures, dtypes, d_models, progress: Callable[[int, int, str], None] | None = None
) -> list[str]:
    """Compile every kernel for these targets into `folder`, for TWELL_LAB_CUBINS elsewhere; the cubins' names.

    progress: called with (done, of, name) after each. Raises InputError if the folder cannot be written.
    """
    try:  # before a minute is spent on compiling
        folders.make_folder(
            folder, 0o755
        )  # not writable by others, whatever the umask: TWELL_LAB_CUBINS would refuse it
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{folder} is no folder that can be written ({error.strerror})") from error
    wanted = [each for arch in architectures for each in builds(arch, dtypes, d_models)]
    made = []
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = pool.map(lambda each: cubins.compile(each[0], each[1], dict(each[2]), cache_in=folder), wanted)
        for cubin in jobs:
            made.append(cubin.name)
            if progress is not None:
                progress(len(made), len(wanted), cubin.name)
    if lost := [name for name in made if not (folder / f"{name}.cubin").is_file()]:
        raise InputError(f"{folder} is no folder that can be written: {len(lost)} of {len(made)} cubins are missing")
    return made
