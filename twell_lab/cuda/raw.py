"""Any kernel of kernels/ as CuPy's RawKernel, for those who launch kernels themselves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from .. import core
from ..core import DeviceError, InputError, StackError
from . import cubins, registry, sources
from .registry import Kernel

if TYPE_CHECKING:
    import cupy


def kernel(name: str, **macros: object) -> cupy.RawKernel:
    """The kernel of kernels/ that is called `name`, compiled for the current GPU as the library compiles it.

    Launch it as CuPy does: `tl.kernel("pack_v1")((blocks,), (threads,), arguments)`, with CuPy arrays and NumPy numbers
    in the order of the source; `.max_dynamic_shared_size_bytes` has to be set for one that asks for more than 48 KiB.
    Nothing is checked at a launch; `twell_lab.simulator` runs the portable ones under watch.

    Args:
        name: an entry such as "gated_v2"; where several sources have it, with the source before it, as in
            "sm80_gate_pack.gate_pack_v3".
        macros: what it is compiled with, True for a macro without a value: VALUE_FP16=True, D_MODEL=4096. What is left
            out is as the library has it for bfloat16 and rows of 2048.

    Raises:
        InputError: for a name that no source has, or that several have, and for a macro that the source does not know.
        StackError: without CuPy, or with one that does not match torch.
        DeviceError: without a GPU, or on one that does not run this kernel.
        CompileError: where the macros do not fit the source.
    """
    found, entry, defines = choose(name, macros)
    core.check_stack()
    core.let_cupy_start()
    try:
        import cupy
    except ImportError as error:
        raise StackError(f"a RawKernel needs CuPy; {cubins.NEEDS_NVRTC}") from error
    if not torch.cuda.is_available():
        raise DeviceError(f"{name} needs a GPU that torch can use; on a CPU twell_lab.simulator runs portable kernels")
    capability = torch.cuda.get_device_capability()
    if not found.runs_on(capability):
        only = "alone" if found.alone else "and newer"
        raise DeviceError(
            f"{name} runs on compute capability {found.oldest[0]}.{found.oldest[1]} {only}; this GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    cubin = cubins.compile(found.file, cubins.architecture(capability, found.file), defines)
    path = core.private_folder() / f"{cubin.name}.cubin"
    path.write_bytes(cubin.image)
    with cupy.cuda.Device(torch.cuda.current_device()):
        return cupy.RawModule(path=str(path)).get_function(entry)


def choose(name: str, macros: dict[str, object]) -> tuple[Kernel, str, dict[str, object]]:
    """(source, entry, all macros) that `kernel` takes for a name and the macros given.

    Raises InputError for a name that no source has, or that several have, and for a macro that it does not know."""
    if not isinstance(name, str):
        raise InputError(f"name is a {type(name).__name__}; the name of a kernel, such as 'gated_v2', is accepted")
    file, _, entry = name.rpartition(".")
    builds = [each for each in registry.usual_builds(macros) if file in ("", each[0].name)]
    having = [(kernel, defines) for kernel, defines in builds if entry in kernel.entries(defines)]
    if not having:
        with_macros = f" with {', '.join(f'{k}={v}' for k, v in macros.items())}" if macros else ""
        known = {each: None for kernel, defines in registry.usual_builds() for each in kernel.entries(defines)}
        raise InputError(f"no kernel is called {name!r:.80}{with_macros}; there are {', '.join(known)}")
    if len(files := dict.fromkeys(kernel.name for kernel, _ in having)) > 1:
        raise InputError(
            f"{name} is in several sources; {' or '.join(f'{each}.{entry}' for each in files)} is accepted"
        )
    chosen, usual = having[0][0], dict(having[0][1])
    words = set(re.findall(r"\w+", " ".join(sources.with_headers(chosen.file).values())))
    if unknown := sorted(set(macros) - words - set(usual)):
        raise InputError(f"{chosen.file} and its headers know no macro {unknown[0]!r:.80}; accepted: one they do")
    return chosen, entry, {**usual, **macros}
