"""All sources of kernels/, as their operations declare them: to compile them ahead of time, and to launch one by name.

A new kernel needs its `.cu` and a file in this folder that declares it as a `Source`."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import core
from ..core import DeviceError, InputError, StackError
from ..cuda import compile as compiler
from ..cuda.launch import VALUE, Macros, Source

if TYPE_CHECKING:
    import cupy

# What an entry's letters stand for (cuda.launch.Entry), in words.
_LETTERS = dict(p="pointer", i="int", u="unsigned", q="long long", f="float", m="tensor map") | {"2": "two pointers"}


@cache
def sources() -> dict[str, Source]:
    """Return every declared source by its name."""
    modules = [import_module(f"{__package__}.{path.stem}") for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Source)]
    return {source.name: source for source in found}


def builds(capability: tuple[int, int], dtypes, widths: Sequence[int]) -> list[tuple[Source, str, Macros]]:
    """List each (source, target, macros) that may be launched on a GPU of this capability, for these types of values
    and widths of rows; target: such as "sm_90"."""
    found = (
        (source, "sm_{}{}{}".format(*capability, "a" * source.alone), source.macros(macros))
        for source in sources().values()
        if source.runs_on(capability)
        for dtype in dtypes
        for macros in source.builds(dtype, widths, capability)
    )
    return list(dict.fromkeys(found))


def prebuild(folder: Path, architectures: Sequence[str], dtypes, d_models: Sequence[int]) -> list[str]:
    """Compile every kernel for these architectures ("sm_90") into `folder`, for TWELL_LAB_CUBINS elsewhere; returns the
    cubins' names. Raises RecordError if the folder cannot be written."""
    core.check_folder(folder)  # before a minute is spent on compiling
    capabilities = [divmod(int(arch.removeprefix("sm_")), 10) for arch in architectures]
    wanted = [build for capability in capabilities for build in builds(capability, dtypes, d_models)]
    with ThreadPoolExecutor(8) as pool:  # the compiler runs outside of Python's lock
        made = pool.map(lambda one: compiler.compile(one[0].file, one[1], dict(one[2]), cache_in=folder), wanted)
        return [cubin.name for cubin in made]


def kernel(name: str, **macros: object) -> cupy.RawKernel:
    """Return the kernel of kernels/ that is called `name`, compiled for the current GPU as the library compiles it.

    Launch it as CuPy does: `tl.kernel("pack_v1")((blocks,), (threads,), arguments)`, with CuPy arrays and NumPy
    numbers. `describe` says which arguments, of what shapes, and on which grid. A kernel that asks for more than 48 KiB
    needs `.max_dynamic_shared_size_bytes` to be set. Nothing is checked at a launch; `twell_lab.simulator` runs the
    portable ones under watch.

    name: an entry such as "gated_v2"; where several sources have it, with the source before it, as in
    "sm80_gate_pack.gate_pack_v3". macros: what it is compiled with, True for a macro without a value: VALUE_FP16=True,
    D_MODEL=4096. What is left out is as the library has it for bfloat16 and rows of 2048.

    Raises InputError for a name that no source has, or that several have, and for a macro that the source does not
    know; StackError without CuPy, or with one that does not match torch; DeviceError without a GPU, or on one that does
    not run this kernel; CompileError where the macros do not fit the source."""
    source, entry, defines = choose(name, macros)
    core.check_stack()
    core.let_cupy_start()
    try:
        import cupy
    except ImportError as error:
        raise StackError(f"a RawKernel needs CuPy; {compiler.NEEDS_NVRTC}") from error
    if not torch.cuda.is_available():
        raise DeviceError(f"{name} needs a GPU that torch can use; on a CPU twell_lab.simulator runs portable kernels")
    capability = torch.cuda.get_device_capability()
    if not source.runs_on(capability):
        only = "alone" if source.alone else "and newer"
        oldest, own = (".".join(map(str, pair)) for pair in (source.oldest, capability))
        raise DeviceError(f"{name} runs on compute capability {oldest} {only}; this GPU has {own}")
    cubin = compiler.compile(source.file, compiler.architecture(capability, source.alone), defines)
    path = core.private_folder() / f"{cubin.name}.cubin"
    path.write_bytes(cubin.image)
    with cupy.cuda.Device(torch.cuda.current_device()):
        return cupy.RawModule(path=str(path)).get_function(entry)


def describe(name: str, **macros: object) -> str:
    """Describe a kernel for who launches it: threads, arguments, what its source says of it and of shapes, and the code
    that launches it in this library, with the grid. Needs no GPU. Arguments and InputError: as in `kernel`."""
    source, entry, defines = choose(name, macros)
    launched = source.kernel(entry, tuple(defines.items()))
    arguments = ", ".join(_LETTERS[letter] for letter in launched.parameters)
    head = (core.kernels_dir() / source.file).read_text(encoding="utf-8").partition("\n#")[0]
    texts = {path.name: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("[a-z]*.py")}
    place, code = next((file, text) for file, text in texts.items() if re.search(rf'Source\(\s*"{source.name}"', text))
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    launches = [call for call in calls if ast.unparse(call.func) in ("launch", "call.launch")]
    return f"""{entry} of kernels/{source.file}: {launched.threads} threads a block; arguments: {arguments}
{head}
Launched in twell_lab/ops/{place} (kernel, grid, arguments):
""" + "\n".join(ast.get_source_segment(code, call) or "" for call in launches)


def choose(name: str, macros: dict[str, object]) -> tuple[Source, str, dict[str, object]]:
    """Find (source, entry, all macros) for the name and the macros that `kernel` was given; InputError as there."""
    if not isinstance(name, str):
        raise InputError(f"name is a {type(name).__name__}; the name of a kernel, such as 'gated_v2', is accepted")
    file, _, entry = name.rpartition(".")
    having = [source for source in sources().values() if file in ("", source.name) and entry in source.entries]
    if not having:
        known = sorted({entry for source in sources().values() for entry in source.entries})
        near = [one for one in known if entry and one.startswith(entry)] or get_close_matches(entry, known, 4)
        near = f"{', '.join(near[:4]) or 'one that is'}; docs/kernels/README.md lists all {len(known)}"
        raise InputError(f"no kernel is called {name!r:.80}; accepted: {near}")
    if len(having) > 1:
        names = " or ".join(f"{source.name}.{entry}" for source in having)
        raise InputError(f"{name} is in several sources; {names} is accepted")
    source = having[0]
    words = set(re.findall(r"\w+", " ".join(compiler.with_headers(source.file).values())))
    dtype = next((dtype for dtype, macro in VALUE.items() if macro in macros), torch.bfloat16)
    builds = source.builds(dtype, [int(macros.get("D_MODEL", 2048))], max(source.oldest, (9, 0)))
    agreeing = (build for build in map(dict, builds) if all(build.get(k, v) == v for k, v in macros.items()))
    usual = next((build for build in agreeing if entry in source.entries_of(build)), None)
    usual = {VALUE[dtype]: True} if usual is None else dict(source.macros(tuple(usual.items())))
    if unknown := sorted(set(macros) - words - set(usual)):
        raise InputError(f"{source.file} and its headers know no macro {unknown[0]!r:.80}; accepted: one they do")
    return source, entry, {**usual, **macros}
