"""What a source declares beside what its `.cu` says, as the compiler and the simulator's reader see it."""

from __future__ import annotations

import math
import re
import struct
from functools import cache

from twell_lab.cuda import compile as compiler
from twell_lab.cuda.launch import Macros, Source
from twell_lab.ops import kernels
from twell_lab.simulator import toolchain

# Bytes, stores and loads together, of kernels that may spill: outside of their loops, or what does not change in one.
MOST_SPILLED = {"smxx_train_lost": 700, "smxx_lost_weights": 3610, "smxx_weight_gradients": 128, "sm90_gate_pack": 128}
MOST_SPILLED |= {"sm80_train_lost": 72, "smxx_listed": 76}
STATIC_SHARED = 48 * 1024
LETTERS = {"int": "i", "unsigned": "u", "long long": "q", "float": "f", "TensorMap": "m"}  # others: of two pointers
_MOST_THREADS = 0x05  # EIATTR_MAX_THREADS of a cubin


def usual() -> list[tuple[str, str, Macros]]:
    """List (source, target, macros): for each entry the build that tl.kernel gives, of bfloat16 and rows of 2048."""
    builds = {}
    for one in kernels.sources().values():
        target = "sm_90a" if one.alone else "sm_80"
        for entry in one.entries:
            _, _, macros = kernels.choose(f"{one.name}.{entry}", {})
            builds[one.name, target, tuple(sorted(macros.items()))] = None
    return list(builds)


def called(job: tuple[str, str, Macros]) -> str:
    """Return the name of a test."""
    name, target, macros = job
    return " ".join([target, name, *(key if value is True else f"{key}={value}" for key, value in macros)])


def resources(log: str) -> dict[str, dict[str, int]]:
    """Read what ptxas said of each kernel: {"registers", "spill_bytes", "stack_bytes", "shared_bytes"} by name."""
    found = {}
    for block in re.split(r"Compiling entry function '", log)[1:]:
        number = lambda pattern: int(m[1]) if (m := re.search(pattern, block)) else 0  # noqa: E731
        found[block[: block.index("'")]] = {
            "registers": number(r"Used (\d+) registers"),
            "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            "stack_bytes": number(r"(\d+) bytes stack frame"),
            "shared_bytes": number(r"(\d+) bytes smem"),
        }
    return found


def check(name: str, target: str, macros: Macros) -> None:
    """Compile a source and compare: its entries and their threads; what ptxas used."""
    one = kernels.sources()[name]
    cubin = compiler.compile(one.file, target, dict(macros))
    used = resources(cubin.log)
    assert set(used) == set(one.entries_of(dict(macros))) and f"for '{target}'" in cubin.log
    for entry, found in used.items():
        kernel = one.kernel(entry, macros)
        assert _threads(cubin.image, entry) == kernel.threads, entry
        assert 0 < found["registers"] <= 255 and found["registers"] * kernel.threads <= 65_536
        assert found["shared_bytes"] <= STATIC_SHARED and found["spill_bytes"] <= MOST_SPILLED.get(name, 0), entry
    if one.alone:  # ptxas's words for giving up; 168 for each of 384 threads are all that a multiprocessor has
        assert "serialized" not in cubin.log and "setmaxnreg" not in cubin.log
        assert {found["registers"] for found in used.values()} == {168}


@cache
def _sections(image: bytes) -> dict[str, bytes]:
    """The sections of an ELF file of 64 bits, by name."""
    start, size, count, names = *struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, start + i * size) for i in range(count)]
    text = image[headers[names][4] :]
    name = lambda at: text[at : text.index(b"\0", at)].decode()  # noqa: E731
    return {name(h[0]): image[h[4] : h[4] + h[5]] for h in headers}


def _threads(image: bytes, entry: str) -> int:
    """The threads that a kernel of a cubin was compiled for."""
    data, at = _sections(image)[f".nv.info.{entry}"], 0
    while at < len(data):
        form, attribute, short = struct.unpack_from("<BBH", data, at)
        if attribute == _MOST_THREADS:
            return math.prod(struct.unpack_from("<3I", data, at + 4))
        at += 4 + (short if form == 4 else 0)
    return 0


def read(one: Source, macros: Macros) -> dict[str, str]:
    """Return the letters of each kernel's parameters, as the simulator's reader sees the source."""
    texts = {file: re.sub(r"__cluster_dims__\(.*?\)", "", text) for file, text in toolchain.sources(one.file).items()}
    declared = toolchain.preprocessed(texts, one.file, dict(macros)).kernels
    return {
        name: "".join("p" if p.pointer else LETTERS.get(p.type, "2") for p in parameters)
        for name, parameters in declared.items()
    }
