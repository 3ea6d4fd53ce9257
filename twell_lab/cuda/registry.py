"""Every kernel, declared once: which GPUs it runs on, what it is compiled with, and who launches it.

What stands in a kernel's source is read from there: its entries with their arguments and the size of their blocks, the
numbers that its launch needs (`sources.number`), and what bounds it. Declaration and source together determine the
cubins that `twell-lab compile` makes, the compile tests, the hashes of `records.provenance`, the kernels that the tests
of the simulator and of the sanitizer must reach, and the check of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import core
from ..core import InputError
from . import macros, sources
from .sources import Entry

Builds = Callable[[torch.dtype, Sequence[int], tuple[int, int]], list[tuple]]


@dataclass(frozen=True)
class Kernel:
    """One `.cu` file of kernels/.

    name: the file's, without its ending. launched_by: the functions and classes of twell_lab that launch it, as
    "module.name". builds: (type of values, widths of rows, a GPU's compute capability) -> every set of macros that
    these launches may ask for there. oldest: compute capability of the oldest GPU that runs it. alone: it runs on no
    other, because only that architecture has its instructions (a target such as sm_90a)."""

    name: str
    launched_by: tuple[str, ...]
    builds: Builds
    oldest: tuple[int, int] = (7, 5)
    alone: bool = False

    @property
    def file(self) -> str:
        return f"{self.name}.cu"

    @property
    def simulated(self) -> bool:
        """Whether the simulator can run it: it cannot run raw PTX, which stands in headers called ptx_ only."""
        return not any(name.startswith("ptx_") for name in sources.with_headers(self.file))

    @property
    def bound(self) -> str:
        """What bounds it, in a line, from the header comment of the source."""
        text = (core.kernels_dir() / self.file).read_text(encoding="utf-8").replace("\n// ", " ")
        found = re.search(r"What bounds it: (.+?)[.;]\s", text)
        return found[1] if found else ""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs it, for some type of values."""
        return capability == self.oldest if self.alone else capability >= self.oldest

    def target(self, arch: str) -> str:
        """The target to compile for on a GPU of architecture `arch`: for "sm_90" that, or "sm_90a" if `alone`."""
        return f"{arch}a" if self.alone else arch

    def entries(self, defines: sources.Macros) -> dict[str, Entry]:
        """The entries that can be launched when it is compiled with these macros, by name."""
        return sources.entries(self.file, defines)


# Besides the functions that launch one kernel, those that decide for a whole call what is launched:
_PORTABLE, _HOPPER, _DECODE = "ops.dispatch._Portable", "ops.dispatch._Hopper", "ops.dispatch._Decode"
_TRAINED = ("ops.differentiable._forward_cuda", "ops.differentiable._backward_cuda")
_TRAINED_ROWS = ("ops.train_rows.weighted_rows", "ops.train_rows.hidden_gradient", "ops.train_rows.input_gradient")
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("smxx_pack", ("ops.portable.pack", _PORTABLE), macros.signed_or_not),
        Kernel(
            "smxx_down",
            ("ops.portable.down", "ops.portable.down_pooled", "ops.portable.gated_pooled", _PORTABLE, _HOPPER),
            macros.down,
        ),
        Kernel("smxx_up", ("ops.portable.gated_pooled", _HOPPER), macros.up),
        Kernel("smxx_gated", ("ops.portable.gated", "ops.portable.gated_pooled", _PORTABLE, _HOPPER), macros.gated),
        Kernel("smxx_gated_int8", ("ops.int8_rows.gated_int8",), macros.gated_int8),
        Kernel("smxx_listed", ("ops.listed.listed", "ops.dispatch._Listed"), macros.listed),
        Kernel("smxx_quantise_rows", ("ops.quantise_rows.quantise_rows",), macros.int8_or_e4m3),
        Kernel("sm80_int8", ("ops.int8_products.product", "ops.int8_products.gate_up"), macros.int8_tiles, (8, 0)),
        Kernel("sm80_gate_pack", ("ops.ampere.gate_pack", *_TRAINED), macros.tensor_cores),
        Kernel("sm80_decode", ("ops.decode.decode", _DECODE), macros.decode_every, (8, 0)),
        Kernel(
            "sm80_kept_inputs", ("ops.kept_inputs.product", "ops.kept_inputs.layer"), macros.kept_inputs_every, (8, 0)
        ),
        Kernel(
            "sm90_gate_pack",
            ("ops.hopper_pack.gate_pack", "ops.hopper_pack.dense_gate", _HOPPER, *_TRAINED),
            macros.hopper_pack,
            (9, 0),
            alone=True,
        ),
        Kernel(
            "sm90_gate_up",
            ("ops.hopper_dense.gate_up", "ops.hopper_dense.finish_lost", _HOPPER),
            macros.clusters_gated_or_plain,
            (9, 0),
            alone=True,
        ),
        Kernel("sm90_down_sums", ("ops.hopper_dense.down_sums", _HOPPER), macros.clusters, (9, 0), alone=True),
        Kernel("sm90_down_rows", ("ops.hopper_dense.finish_lost", _HOPPER), macros.clusters, (9, 0), alone=True),
        Kernel("smxx_survivors", ("ops.train_rows.survivors", *_TRAINED), macros.whole_rows),
        Kernel("smxx_train_rows", _TRAINED_ROWS, macros.whole_rows),
        Kernel("smxx_train_slabs", ("ops.train_rows.survivors", *_TRAINED_ROWS, *_TRAINED), macros.row_slabs),
        Kernel(
            "smxx_train_lost",
            ("ops.train_lost.lost_forward", "ops.train_lost.lost_backward", *_TRAINED),
            macros.sixteen_bits,
        ),
        Kernel(
            "sm80_train_lost",
            ("ops.train_lost.lost_forward", "ops.train_lost.lost_backward", *_TRAINED),
            macros.sixteen_bits,
            (8, 0),
        ),
        Kernel("smxx_lost_weights", ("ops.train_lost.lost_backward", *_TRAINED), macros.sixteen_bits),
        Kernel("smxx_train_dense", ("ops.train_dense.dense_hidden", "ops.train_dense.dense_gradients"), macros.each),
        Kernel(
            "smxx_columns",
            ("ops.train_columns.by_column", "ops.train_columns.weight_gradients", *_TRAINED),
            macros.sixteen_bits,
        ),
        Kernel("smxx_weight_gradients", ("ops.train_columns.weight_gradients", *_TRAINED), macros.gated_or_plain),
        Kernel("smxx_transpose", ("ops.transpose.transposed", *_TRAINED), macros.sixteen_bits),
        Kernel("smxx_find_microtiles", ("ops.microtiles.find",), macros.microtiles),
        Kernel("sm80_microtiles", ("ops.microtiles.product",), macros.microtiles, (8, 0)),
        Kernel("smxx_spmm", ("ops.spmm.rows_product", "ops.spmm.SparseOperand"), macros.each),
        Kernel("smxx_spmm_coo", ("ops.spmm.coo_product", "ops.spmm.SparseOperand"), macros.each),
        Kernel("sm80_blocks", ("ops.block_linear.BlockOperand",), macros.block_tiles, (8, 0)),
    )
}
OLDEST = min(kernel.oldest for kernel in KERNELS.values())  # compute capability of the oldest GPU that runs any kernel


def find(name: str) -> Kernel:
    """The kernel of this name, or of this file. Raises InputError for one that is not declared."""
    kernel = KERNELS.get(name.removesuffix(".cu"))
    if kernel is None:
        raise InputError(f"there is no kernel {name!r:.80}; declared are {', '.join(KERNELS)}")
    return kernel


def builds(
    capability: tuple[int, int], dtypes: Sequence[torch.dtype], widths: Sequence[int]
) -> list[tuple[Kernel, tuple]]:
    """(kernel, macros) of everything that may be launched on a GPU of this capability, for these types of values and
    widths of rows, without repeats."""
    found = (
        (kernel, defines)
        for kernel in KERNELS.values()
        if kernel.runs_on(capability)
        for dtype in dtypes
        for defines in kernel.builds(dtype, widths, capability)
    )
    return list(dict.fromkeys(found))


# ---- entries and their arguments


def usual_builds(given: Mapping[str, Any] = {}) -> list[tuple[Kernel, tuple]]:
    """(kernel, macros) of every kernel and version, for the type of values and the width of rows that the macros
    `given` name, or else for bfloat16 rows of 2048; only those that agree with `given`."""
    dtypes = [dtype for dtype, name in macros.VALUE.items() if name in given] or [torch.bfloat16]
    widths = [given.get("D_MODEL", 2048)]
    found = [build for capability in ((9, 0), (7, 5)) for build in builds(capability, dtypes, widths)]
    setups = [macros.setup_for((9, 0), version).defines(dtypes[0]) for version in (1, 2, 3)]
    found += [(KERNELS["sm80_gate_pack"], defines) for defines in setups if dtypes[0].itemsize == 2]
    agrees = lambda defines: all(dict(defines).get(k, v) == v for k, v in given.items())  # noqa: E731
    return [(kernel, defines) for kernel, defines in dict.fromkeys(found) if agrees(defines)]


def signature(name: str, entry: str, defines: sources.Macros = ()) -> Entry:
    """One entry of a kernel, with its parameters in order.

    name: the kernel's, or its file's. defines: the macros that the kernel is compiled with; without any, those of the
    first build of `usual_builds` that has the entry. Raises InputError for a kernel or an entry that does not exist."""
    kernel = find(name)
    tried = [tuple(defines)] if defines else [each for found, each in usual_builds() if found is kernel]
    known: dict[str, Entry] = {}
    for each in tried:
        known = {**kernel.entries(each), **known}
    if entry not in known:
        raise InputError(f"{kernel.file} has no entry {entry!r:.80}; it has {', '.join(known)}")
    return known[entry]
