"""The CUDA kernels compiled for the CPU: run, checked, counted and stepped through without a GPU.

    program = simulator.compile("smxx_pack.cu", {"VALUE_BF16": True})
    run = program.launch("pack_v2", grid, block, (gate, packed, rows, columns, tile, words), watch="counts")
    print(run.counts)

The `.cu` is the one that the GPU gets. What C++ leaves open is done as this CPU does it, such as `(int)` of NaN, and
shifts by the width or more. GCC's C++ compiler is needed (Linux, x86-64 or arm64): `available()`."""

from . import faults
from .counts import H100, Counts, Gpu, predicted_time
from .faults import Fault, Unsupported
from .program import Program, Run, compile, step, watching
from .toolchain import available, compiler
from .trace import Trace

__all__ = [
    "available",
    "compile",
    "compiler",
    "Counts",
    "Fault",
    "faults",
    "Gpu",
    "H100",
    "predicted_time",
    "Program",
    "Run",
    "step",
    "Trace",
    "Unsupported",
    "watching",
]
