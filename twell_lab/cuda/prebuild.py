"""Compiles ahead of time all that launches may need: for machines without a compiler, and to fill a cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import core
from ..core import InputError
from . import cubins, registry

_THREADS = 8  # the compiler runs outside of Python's lock


def builds(arch: str, dtypes, d_models) -> list[tuple[str, str, tuple]]:
    """(file, target, macros) of everything that may be launched on a GPU of `arch`, for these types of values and
    widths of rows."""
    found = registry.builds(divmod(int(arch.removeprefix("sm_")), 10), dtypes, d_models)
    return [(kernel.file, kernel.target(arch), defines) for kernel, defines in found]


def prebuild(
    folder: Path, architectures, dtypes, d_models, progress: Callable[[int, int, str], None] | None = None
) -> list[str]:
    """Compile every kernel for these targets into `folder`, for TWELL_LAB_CUBINS elsewhere; the cubins' names.

    progress: called with (done, of, name) after each. Raises InputError if the folder cannot be written.
    """
    try:  # before a minute is spent on compiling
        core.check_folder(folder)
    except core.RecordError as error:
        raise InputError(str(error)) from error
    wanted = [each for arch in architectures for each in builds(arch, dtypes, d_models)]
    made = []
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = pool.map(lambda each: cubins.compile(each[0], each[1], dict(each[2]), cache_in=folder), wanted)
        for cubin in jobs:
            made.append(cubin.name)
            if progress is not None:
                progress(len(made), len(wanted), cubin.name)
    if lost := [name for name in made if not (folder / f"{name}.cubin").is_file()]:
        raise InputError(f"{folder} is not a folder that can be written: {len(lost)} of {len(made)} cubins are missing")
    return made
