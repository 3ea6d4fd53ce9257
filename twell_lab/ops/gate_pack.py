"""gate_pack: the gate GEMM packs what fires before it is written (kernels/sm90_gate_pack.cu and sm80_gate_pack.cu).

x [tokens, d_model] x gate [d_ff, d_model]^T + bias becomes TwELL words, int32 [tokens, tiles, 32], and beside them the
pool, int32 [ceil(tokens / 16), tiles, 64], as twell_lab.formats describes both. Words that nobody reads are not
written. Rows that the pool cannot hold are left to whoever reads it (ops/gated.py, ops/down_rows.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.launch import Buffer, Call, Entry, Layout, Macros, Map, Source, aligned, sixteen_bits, value
from ..cuda.tma import matrix_map
from ..formats.twell import POOL_ROWS, POOL_WORDS, TILE, WORDS, packed_and_pool

VECTOR = 8  # values in 16 bytes, the pieces in which rows are copied
TENSOR_CORES_OF_BF16 = (8, 0)  # the first GPUs with them; those of float16 came with 7.5
POOLED = (("POOLED_TILE", TILE), ("POOLED_WORDS", WORDS), ("POOL_ROWS", POOL_ROWS), ("POOL_WORDS", POOL_WORDS))
TOLERANCE = 0.0  # the words of the gate as it is rounded once, bias included


def _new_packed(call: Call, x: Buffer, gate: Buffer) -> tuple[Buffer, Buffer]:
    """Add memory for a packed gate and its pool."""
    tokens, tiles = len(x), -(-len(gate) // TILE)
    packed = call.empty(tokens, tiles, WORDS, dtype=torch.int32)
    return packed, call.empty(-(-tokens // POOL_ROWS), tiles, POOL_WORDS, dtype=torch.int32)


def reference(x: Tensor, gate: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what `gate_pack_sm90` and `gate_pack_sm80` compute, from torch's operations; unread words are 0."""
    return packed_and_pool(dense_reference(x, gate, bias))[:2]


def dense_reference(x: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the gate [tokens, d_ff], rounded once, as `dense_gate` computes it."""
    sums = x.float() @ gate.float().t()
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


# ---- mma.sync: float16 from compute capability 7.5, bfloat16 from 8.0

ROWS = 128  # tokens of a block's tile; its neurons are a tile of the format
_WIDEST = 2**22  # d_model: offsets within a tile's rows are 32-bit numbers of bytes
# KiB of shared memory that one block may have, by compute capability; GPUs that are not named here have at least 99.
_SHARED = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}


def most_shared(capability: tuple[int, int]) -> int:
    """Return how many bytes of shared memory a block may have on such a GPU."""
    return _SHARED.get(capability, 99) * 1024


class Setup(NamedTuple):
    """One specialisation. turing: without instructions that came after sm_75."""

    version: int
    k_step: int  # columns of x and of the gate's weights in one stage of the pipeline
    stages: int
    turing: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory a block asks for."""
        pipeline, masks = self.stages * (ROWS + TILE) * self.k_step * 2, self.version > 2
        half = ROWS // 2 * TILE * 2 + (ROWS // 2 * TILE // 8 if masks else 0)  # of a tile that is laid out for packing
        packing = half if masks and self.turing else 2 * half
        return pipeline + packing if self.version > 3 else max(pipeline, packing)

    def macros(self, dtype: torch.dtype) -> Macros:
        """Return what the source is compiled with."""
        sizes = (("VERSION", self.version), ("BK", self.k_step), ("STAGES", self.stages))
        return (*value(dtype), *sizes, *((("TURING", True),) if self.turing else ()), ("LAUNCH_SHARED", self.shared))


def setup_for(capability: tuple[int, int], version: int | None = None) -> Setup:
    """Return the specialisation for a GPU: version 1 to 4 as sm80_gate_pack.cu lists them, None for the newest that
    it has enough shared memory for."""
    limit = most_shared(capability)
    if capability < TENSOR_CORES_OF_BF16:
        setups = {1: Setup(1, 32, 1, True), 2: Setup(2, 32, 2, True), 3: Setup(3, 32, 2, True)}
    else:
        # On an H100, steps of 64 columns instead of 32, with half as many barriers, gain 5%; a pipeline that loads the
        # next tile while one is packed (v4) gains 1%. Where there is too little memory for both: v3 with steps of 64.
        steps = (64, 3) if Setup(3, 64, 3).shared <= limit else (32, 4)
        setups = {1: Setup(1, 32, 1), **{number: Setup(number, *steps) for number in (2, 3, 4)}}
        setups = {number: setup for number, setup in setups.items() if setup.shared <= limit}
    return setups[version or max(setups)]


def _tensor_cores(dtype: torch.dtype, widths, capability: tuple[int, int]) -> list[Macros]:
    runs = dtype.itemsize == 2 and capability >= (SM80.oldest if dtype == torch.float16 else TENSOR_CORES_OF_BF16)
    return [setup_for(capability, n).macros(dtype) for n in range(setup_for(capability).version, 0, -1)] if runs else []


def _of_version(version: int, threads: int, parameters: str) -> Entry:
    return Entry(threads, parameters, lambda macros: macros["VERSION"] == version)


SM80 = Source(
    "sm80_gate_pack",
    {f"gate_pack_v{version}": _of_version(version, 256, "ppppppiii") for version in (1, 2, 3, 4)},
    builds=_tensor_cores,
    constants=(*POOLED, ("BM", ROWS), ("THREADS", 256)),
)


def takes_sm80(capability: tuple[int, int], x: Buffer | Layout, gate: Buffer | Layout) -> bool:
    """Return whether gate_pack_sm80 takes x [tokens, d_model] and gate [d_ff, d_model]: contiguous, on 16-byte
    boundaries, both widths multiples of 8."""
    (tokens, d_model), d_ff = x.shape, gate.shape[0]
    widths = 0 < d_model <= _WIDEST and d_ff > 0 and d_model % VECTOR == 0 and d_ff % VECTOR == 0
    dense = x.strides == (d_model, 1) and gate.strides == (d_model, 1) and aligned(x, gate)
    runs = capability >= (TENSOR_CORES_OF_BF16 if x.dtype == torch.bfloat16 else SM80.oldest)
    small = -(-tokens // ROWS) * -(-d_ff // TILE) < 2**30
    return runs and x.dtype.itemsize == 2 and x.dtype == gate.dtype and widths and dense and small


def gate_pack_sm80(call: Call, x, gate, bias=None, lost=None, version: int | None = None) -> tuple[Buffer, Buffer]:
    """Add the gate GEMM that packs: x [tokens, d_model], gate [d_ff, d_model], bias [d_ff] or None -> (packed, pool).

    lost: int32 [1 or more] or None; lost[0] is set to 0 for the kernels that follow, where there are tokens. version:
    as for `setup_for`."""
    (tokens, d_model), d_ff = x.shape, gate.shape[0]
    setup, (packed, pool) = setup_for(call.capability, version), _new_packed(call, x, gate)
    if tokens:
        blocks = -(-tokens // ROWS) * -(-d_ff // TILE)
        if setup.version > 3:  # each block takes several tiles, one after another
            blocks = min(blocks, call.units)
        kernel = SM80.kernel(f"gate_pack_v{setup.version}", setup.macros(x.dtype), setup.shared)
        call.launch(kernel, (blocks, 1), x, gate, bias, packed, pool, lost, tokens, d_model, d_ff)
    return packed, pool


# ---- wgmma and the copy engine: compute capability 9.0 alone

CLUSTER, BM, BN, BK, STAGES, CONSUMERS = 2, 128, TILE, 64, 4, 2  # of sm90_mainloop.cuh
MAINLOOP = (("BM", BM), ("BN", BN), ("BK", BK), ("STAGES", STAGES), ("CONSUMERS", CONSUMERS))
THREADS = 128 * (CONSUMERS + 1)
EPILOGUE = STAGES * (BM + BN) * BK * 2 + 128  # bytes of shared memory before what an includer lays out
VERSIONS = (1, 2, 3)
_SHARED_BYTES = EPILOGUE + BM * WORDS * 4 + CONSUMERS * (128 * 64 + 2 * BN * 2)
_MOST_TOKENS = 2**31 - 256  # rows are counted in 32 bits, in tiles of 256


SM90 = Source(
    "sm90_gate_pack",
    {f"gate_pack_v{version}": _of_version(version, THREADS, "mmmppppiii") for version in (0, *VERSIONS)},
    builds=lambda dtype, *_: [
        (*macros, ("BIAS", bias), ("VERSION", version))
        for macros in sixteen_bits(dtype)
        for bias in (0, 1)
        for version in (0, *VERSIONS)  # version 0 does not pack
    ],
    constants=(*POOLED, *MAINLOOP, ("LAUNCH_SHARED", _SHARED_BYTES)),
    oldest=(9, 0),
    alone=True,
)


def fits(capability: tuple[int, int], *matrices: Buffer | Layout) -> bool:
    """Return whether the copy engine can read these matrices [n, d]: 16-bit values of one type on a Hopper GPU, each
    row contiguous and aligned to 16 bytes; there may be gaps between rows."""

    def readable(m: Buffer | Layout) -> bool:
        rows, d = m.shape
        row = m.strides[0] if rows > 1 else d
        return m.dtype == matrices[0].dtype and d > 0 and m.strides[1] == 1 and row >= d and row % VECTOR == 0

    short = matrices[0].dtype.itemsize == 2
    return SM90.runs_on(capability) and short and aligned(*matrices) and all(map(readable, matrices))


def takes_sm90(capability: tuple[int, int], x: Buffer | Layout, gate: Buffer | Layout) -> bool:
    """Return whether gate_pack_sm90 takes x [tokens, d_model] and gate [d_ff, d_model]; both widths are multiples of
    8."""
    d_ff, d_model = gate.shape
    widths = d_model % VECTOR == 0 and d_ff % VECTOR == 0 and d_ff > 0 and x.shape[0] < _MOST_TOKENS
    return widths and fits(capability, x, gate)


def gate_pack_sm90(call: Call, x, gate, bias=None, lost=None, version: int | None = None) -> tuple[Buffer, Buffer]:
    """Add the gate GEMM that packs, as `gate_pack_sm80` does. version: 1 to 3, None the fastest."""
    packed, pool = _new_packed(call, x, gate)
    _launch(call, x, gate, bias, packed, pool, lost, version or VERSIONS[-1])
    return packed, pool


def dense_gate(call: Call, x: Buffer, gate: Buffer, bias: Buffer | None = None) -> Buffer:
    """Add the same main loop without packing, for checks -> the gate [tokens, d_ff]."""
    out = call.empty(x.shape[0], gate.shape[0], dtype=x.dtype)
    _launch(call, x, gate, bias, out, None, None, 0)
    return out


def _launch(call: Call, x: Buffer, gate: Buffer, bias, packed, pool, lost, version: int) -> None:
    (tokens, d_model), d_ff, cluster = x.shape, gate.shape[0], 1 if version == 1 else CLUSTER
    tiles = -(-tokens // (BM * cluster)) * -(-d_ff // BN)
    if tiles:
        macros = (*value(x.dtype), ("BIAS", int(bias is not None)), ("VERSION", version))
        kernel = SM90.kernel(f"gate_pack_v{version}", macros, _SHARED_BYTES)
        grid, maps = (min(call.units // cluster, tiles) * cluster, 1), (matrix_map(x, BM), *_gate_maps(gate, cluster))
        call.launch(kernel, grid, *maps, packed, bias, pool, lost, tokens, d_model, d_ff)


def _gate_maps(gate: Buffer, cluster: int) -> tuple[Map, Map]:
    """Return two tensor maps of the gate's rows, in the order in which the packing epilogue wants the columns: of the
    whole tiles, and of the narrow last tile.

    After wgmma, lane q of a group of four lanes holds columns 8 j + 2 q + e of a tile. Row `span q + 2 j + e` of the
    weights is put there, so that a lane holds `span` neighbouring columns in order: 64, and a quarter of the width in a
    narrow last tile. The map is of a view [tile, j, q, e, k] of the weights, so no data are moved. Where there are only
    whole tiles, or only a narrow one, both maps are the same."""
    (d_ff, d_model), row = gate.shape, gate.strides[0] * gate.dtype.itemsize

    def view(first: int, tiles: int, span: int) -> Map:
        dims, strides = (d_model, 2, 4, span // 2, tiles), (row, span * row, 2 * row, BN * row)
        return Map(gate[first:], dims, strides, (BK, 2, 4, 32 // cluster, 1))

    tiles, width = divmod(d_ff, BN)
    last = [view(tiles * BN, 1, width // 4)] if width else []
    whole = [view(0, tiles, BN // 4)] if tiles else last
    return whole[0], (last or whole)[0]
