"""Which macros each kernel is compiled with: for a type of values, a width of rows, and a GPU.

A set of macros is a tuple of (name, value) pairs; the value True stands for a macro without a value. The functions at
the end list, for `registry`, every set that launches may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..core import InputError
from . import sources

VALUE = {torch.bfloat16: "VALUE_BF16", torch.float16: "VALUE_FP16", torch.float32: "VALUE_FP32"}
TENSOR_CORES_OF_BF16 = (8, 0)  # the first GPUs with them; those of float16 came with 7.0


def value(dtype: torch.dtype) -> tuple:
    """The macros of a kernel that needs only its type of values."""
    return ((VALUE[dtype], True),)


# ---- what fires, and with which value: sm80_decode, smxx_pack, smxx_gated

# By kind (ops.activation.Activation): the macro of activation.cuh; "" for the ReLU, which needs none.
ACTIVATIONS = {"relu": "", "above": "ACTS_ABOVE", "silu": "ACTS_SILU", "gelu": "ACTS_GELU"}
ACTIVATIONS["gelu_tanh"] = "ACTS_GELU_TANH"


def activation(kind: str, both: bool = False) -> tuple:
    """The macros for an activation of this kind, with a ReLU on up as well or not."""
    return (*(((ACTIVATIONS[kind], True),) if ACTIVATIONS[kind] else ()), *((("BOTH", True),) if both else ()))


def kept(signed: bool) -> tuple:
    """The macros of what is packed: all that is not zero, or what is positive."""
    return (("SIGNED", True),) if signed else ()


# ---- whole rows in registers: smxx_down, smxx_gated, smxx_up, smxx_survivors, smxx_train_rows

TEAMS = 8  # teams that share each token when there are few tokens
_CHUNKS_A_LANE = 4  # 16-byte chunks of one row that a lane keeps in registers; more would spill
_MOST_WARPS = 16  # 128 registers for each of 512 threads is all a multiprocessor has


@lru_cache
def specialisation(dtype: torch.dtype, d_model: int, teams: int = 1) -> tuple | None:
    """The macros of the kernels that keep whole rows in registers, for this width; None where only v1 kernels take it.

    teams: how many teams of warps share a token, at most; fewer where a block would have more than 512 threads.
    """
    vector = 16 // dtype.itemsize
    if d_model % vector:
        return None
    warps = -(-d_model // (32 * vector * _CHUNKS_A_LANE))
    if warps > _MOST_WARPS:
        return None
    teams = min(teams, _MOST_WARPS // warps)
    shared = (("TEAMS", teams),) if teams > 1 else ()
    return ((VALUE[dtype], True), ("D_MODEL", d_model), ("WARPS", warps), *shared)


def any_width(dtype: torch.dtype) -> tuple:
    """The v1 kernels take any width at run time; the file's other kernels still need some D_MODEL to compile."""
    return ((VALUE[dtype], True), ("D_MODEL", 256), ("WARPS", 1))


# ---- slabs of rows: smxx_train_slabs

# By kernel: the lanes that share an entry, which is also the width of a slab in vectors of 16 bytes; and the entries
# that a lane loads at once.
SLAB_SHAPES = {"weighted_rows": (32, 8), "input_gradient": (16, 2), "dots": (32, 8)}


@lru_cache
def slabs(dtype: torch.dtype, d_model: int, shape: tuple[int, int]) -> tuple:
    """The macros of smxx_train_slabs for this width and a shape from SLAB_SHAPES."""
    sizes = (("D_MODEL", d_model), ("ROW_LANES", shape[0]), ("AT_ONCE", shape[1]))
    return ((VALUE[dtype], True), *sizes)


# ---- sm80_gate_pack

_GATE_PACK = "sm80_gate_pack.cu"
# KiB of shared memory that one block may have, by compute capability; GPUs that are not named here have at least
# _LEAST_SHARED.
_SHARED = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED = 99


class Setup(NamedTuple):
    """One specialisation. turing: without instructions that came after sm_75."""

    version: int
    k_step: int  # columns of x and of the gate's weights in one stage of the pipeline
    stages: int
    turing: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory a block asks for."""
        return _shared_bytes(self)

    def defines(self, dtype: torch.dtype) -> tuple:
        sizes = (("VERSION", self.version), ("BK", self.k_step), ("STAGES", self.stages))
        return (*value(dtype), *sizes, *((("TURING", True),) if self.turing else ()))


@lru_cache
def _shared_bytes(setup: Setup) -> int:
    number = lambda name: sources.number(_GATE_PACK, name, setup.defines(torch.float16))  # noqa: E731
    pipeline = setup.stages * number("STAGE_BYTES")
    packing = (1 if number("TAKE_TURNS") else 2) * number("HALF_BYTES")  # for one half of a tile at a time, or both
    return pipeline + packing if number("APART") else max(pipeline, packing)


@lru_cache
def setup_for(capability: tuple[int, int], version: int | None = None) -> Setup:
    """The specialisation for a GPU: version 1 to 4 as sm80_gate_pack.cu lists them, None for the newest that fits it.

    Raises InputError for a version that the GPU has too little shared memory for.
    """
    limit = _SHARED.get(capability, _LEAST_SHARED) * 1024
    if capability < TENSOR_CORES_OF_BF16:
        made = {1: Setup(1, 32, 1, True), 2: Setup(2, 32, 2, True), 3: Setup(3, 32, 2, True)}
    else:
        # On an H100, steps of 64 columns instead of 32, with half as many barriers, gain 5%; a pipeline that loads the
        # next tile while one is packed (v4) gains 1%. Where there is too little memory for both: v3 with steps of 64.
        steps = (64, 3) if Setup(3, 64, 3).shared <= limit else (32, 4)
        made = {1: Setup(1, 32, 1), **{number: Setup(number, *steps) for number in (2, 3, 4)}}
        made = {number: setup for number, setup in made.items() if setup.shared <= limit}
    if version not in (None, *made):
        raise InputError(
            f"version is {version}; {min(made)} to {max(made)} are accepted on a GPU of compute capability {capability}"
        )
    return made[version or max(made)]


# ---- sm80_decode

_DECODE = "sm80_decode.cu"
_DECODE_NAMES = ("BANDS", "BLOCK_WARPS", "STAGES", "BK", "RESIDENT")  # macros of the source
# Their values, by `decode_tokens`:
_SHAPES = {1: (1, 8, 4, 64, 3), 8: (1, 8, 2, 64, 3), 16: (1, 8, 2, 64, 3), 32: (3, 8, 2, 64, 1), 64: (3, 8, 2, 32, 1)}
_SMALLER = {32: (1, 8, 2, 32, 1), 64: (1, 8, 2, 32, 1)}  # the same on GPUs with 99 or 163 KiB of shared memory a block
# DOWN_LANES by `decode_tokens`, for activations other than the ReLU, which may leave half of the neurons firing.
_DOWN_LANES = {1: 4, 8: 8, 16: 16}
SHARED_BY_DEFAULT = 48 * 1024  # bytes of dynamic shared memory that any kernel may ask for


def decode_tokens(tokens: int) -> int:
    """The number of tokens that the decode kernel for this many tokens is compiled for."""
    return 1 if tokens == 1 else 8 if tokens <= 8 else 16 if tokens <= 16 else 32 if tokens <= 32 else 64


def decode_shape(rows: int, d_ff: int, capability: tuple[int, int], multiprocessors: int) -> tuple[int, ...]:
    """BANDS, BLOCK_WARPS, STAGES, BK and RESIDENT for `rows` tokens, as `decode_tokens` gives them.

    From 17 tokens on a multiprocessor holds one block, and reading the weights and x takes most of the time. So a block
    has three bands or two, whichever leaves the busiest multiprocessor less to read."""
    shape = _SHAPES[rows]
    if capability[0] not in (9, 10):
        return _SMALLER.get(rows, shape)
    if rows <= 16:
        return shape
    band = sources.number(_DECODE, "BAND")

    def busiest(bands: int) -> int:
        return -(-d_ff // (band * bands * multiprocessors)) * (band * bands + rows)

    return (min((shape[0], shape[0] - 1), key=busiest), *shape[1:])


@lru_cache(maxsize=1024)
def decode(dtype: torch.dtype, d_model: int, rows: int, shape: tuple[int, ...], acts: tuple = ()) -> tuple[tuple, int]:
    """(macros, bytes of dynamic shared memory of decode_gate_v2) for `rows` tokens and a shape from `decode_shape`.

    acts: the macros of the activation, as `activation` gives them."""
    macros = (*value(dtype), ("D_MODEL", d_model), ("TOKENS", rows), *zip(_DECODE_NAMES, shape), *acts)
    if acts and rows in _DOWN_LANES:
        macros += (("DOWN_LANES", _DOWN_LANES[rows]),)
    number = lambda name: sources.number(_DECODE, name, macros)  # noqa: E731
    parts = number("BLOCK_WARPS") * number("PADDED_TOKENS") * number("PART_STRIDE") * 4
    shared = max(number("BLOCK_WARPS") * number("STAGES") * number("STAGE_BYTES"), parts)
    if shared > SHARED_BY_DEFAULT - 16 * 1024:
        # With the kernel's static shared memory this is more than a launch gets without permission. A number above
        # SHARED_BY_DEFAULT makes the launcher ask for it.
        shared = max(shared, SHARED_BY_DEFAULT + 16)
    return macros, shared


# ---- sm80_kept_inputs


@lru_cache(maxsize=1024)
def kept_inputs(dtype: torch.dtype, tokens: int, paired: bool, kind: str | None) -> tuple:
    """The macros for 1 to 4 tokens, one weight or two, and an activation of this kind or none.

    A product without an activation is the one into d_model, which has few slabs: its blocks have more warps."""
    sizes = (("TOKENS", 1 if tokens == 1 else 4), ("PAIRED", int(paired)), ("ACTIVATED", int(kind is not None)))
    warps = (("BLOCK_WARPS", 16),) if kind is None else ()
    return (*value(dtype), *sizes, *warps, *(() if kind is None else activation(kind)))


# ---- sm80_blocks

_BLOCKS = "sm80_blocks.cu"
_BLOCK_TILES = ((16, 16), (16, 32), (32, 32), (64, 32), (128, 32))  # BN, BK


@lru_cache
def blocks(dtype: torch.dtype, high: int, wide: int) -> tuple[tuple, int]:
    """(macros, bytes of dynamic shared memory of blocks_v2) for blocks of high x wide, multiples of 16: with the
    largest tile that divides them."""
    tile = max(each for each in _BLOCK_TILES if not (high % each[0] or wide % each[1]))
    macros = (*value(dtype), *zip(("BN", "BK"), tile))
    return macros, sources.number(_BLOCKS, "SHARED_BYTES", macros)


# ---- sm90_gate_pack

PACK_VERSIONS = (1, 2, 3)


# ---- smxx_find_microtiles, sm80_microtiles

MICROTILE_ROWS = (32, 64, 128)


def microtile(dtype: torch.dtype, rows: int) -> tuple:
    """The macros for micro-tiles of so many rows, one of MICROTILE_ROWS."""
    return (*value(dtype), ("BM", rows))


# ---- smxx_quantise_rows


def few_bits(dtype: torch.dtype, kind: torch.dtype) -> tuple:
    """The macros for rows of this type that become INT8 or E4M3."""
    return (*value(dtype), *((("E4M3", True),) if kind == torch.float8_e4m3fn else ()))


# ---- sm80_int8

_INT8 = "sm80_int8.cu"
_INT8_NAMES = ("BM", "BN", "BK", "STAGES")  # macros of the source
# Their values, by how many tokens a tile is for:
_INT8_TILES = {"few": (16, 32, 128, 8), "some": (64, 64, 128, 4), "many": (128, 256, 64, 4)}
_INT8_LONGER = (128, 256, 128, 3)  # "many" with half as many barriers, where a block may have that much shared memory
INT8_TILES = tuple(_INT8_TILES)


@lru_cache
def int8(dtype: torch.dtype, gated: bool, tile: str, capability: tuple[int, int]) -> tuple[tuple, int]:
    """(macros, bytes of dynamic shared memory of int8_v2) for a tile of INT8_TILES; gated: of two weights at once."""
    made = lambda sizes: (*value(dtype), ("GATED", int(gated)), *zip(_INT8_NAMES, sizes))  # noqa: E731
    shared = lambda macros: sources.number(_INT8, "SHARED_BYTES", macros)  # noqa: E731
    usual, longer = made(_INT8_TILES[tile]), made(_INT8_LONGER)
    if tile == "many" and shared(longer) <= _SHARED.get(capability, _LEAST_SHARED) * 1024:
        usual = longer
    return usual, shared(usual)


# ---- every set of macros that launches may ask for, given (dtype, widths of rows, a GPU's compute capability)

Widths = Sequence[int]
Capability = tuple[int, int]


def each(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """One set for each type of values."""
    return [value(dtype)]


def signed_or_not(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """One set for each type of values, and one for values of either sign."""
    return [(*value(dtype), *kept(signed)) for signed in (False, True)]


def int8_or_e4m3(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """For each type of values, one set for INT8 and one for E4M3."""
    return [few_bits(dtype, kind) for kind in (torch.int8, torch.float8_e4m3fn)]


def sixteen_bits(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """One set for each type of 16-bit values."""
    return [value(dtype)] if dtype.itemsize == 2 else []


def gated_or_plain(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values, a gated layer (as the source has it) and a plain one."""
    return [macros for each in sixteen_bits(dtype) for macros in (each, (*each, ("GATED", 0)))]


def _rows(dtype: torch.dtype, widths: Widths, teams: Sequence[int] = (1, TEAMS)) -> list[tuple]:
    found = {specialisation(dtype, width, team) for width in widths for team in teams}
    return sorted((macros for macros in found if macros is not None), key=str)


def _walking(dtype: torch.dtype, widths: Widths, more: Sequence[tuple] = ((),)) -> list[tuple]:
    return [(*macros, *each) for each in more for macros in (*_rows(dtype, widths), any_width(dtype))]


def _with_pool(dtype: torch.dtype, widths: Widths, teams: Sequence[int] = (1, TEAMS)) -> list[tuple]:
    return [(*macros, ("POOL", True)) for macros in _rows(dtype, widths, teams)] if dtype.itemsize == 2 else []


def gated(dtype: torch.dtype, widths: Widths, capability: Capability = (9, 0)) -> list[tuple]:
    """Each width, for many tokens and for few, with a pool and without one; and any width. Without a pool also for the
    other activations."""
    more = (kept(True), activation("relu", both=True))
    return [*_walking(dtype, widths), *_walking(dtype, widths, more), *_with_pool(dtype, widths)]


def gated_int8(dtype: torch.dtype, widths: Widths, capability: Capability = (9, 0)) -> list[tuple]:
    """Each width, for many tokens and for few; and any width. Each for values of one sign, and of either."""
    return _walking(dtype, widths, ((), kept(True)))


def down(dtype: torch.dtype, widths: Widths, capability: Capability = (9, 0)) -> list[tuple]:
    """As `gated`; and the second of the two passes that serve many tokens."""
    walking = [*_walking(dtype, widths), *_walking(dtype, widths, (kept(True),)), *_with_pool(dtype, widths)]
    return [*walking, *((*macros, ("HIDDEN", True)) for macros in up(dtype, widths))]


def up(dtype: torch.dtype, widths: Widths, capability: Capability = (9, 0)) -> list[tuple]:
    """The first of the two passes: each width, with a pool."""
    return [macros for macros in _with_pool(dtype, widths, (1,)) if "TEAMS" not in dict(macros)]


def whole_rows(dtype: torch.dtype, widths: Widths, capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values, each width."""
    return _rows(dtype, widths, (1,)) if dtype.itemsize == 2 else []


def row_slabs(dtype: torch.dtype, widths: Widths, capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values, each width and shape of a slab."""
    taken = [dict(macros)["D_MODEL"] for macros in whole_rows(dtype, widths)]
    return [slabs(dtype, width, shape) for width in taken for shape in dict.fromkeys(SLAB_SHAPES.values())]


def tensor_cores(dtype: torch.dtype, widths: Widths, capability: Capability) -> list[tuple]:
    """The newest setup for this GPU, for the types of values that its tensor cores take."""
    takes = dtype == torch.float16 or (dtype == torch.bfloat16 and capability >= TENSOR_CORES_OF_BF16)
    return [setup_for(capability).defines(dtype)] if takes else []


def decode_every(dtype: torch.dtype, widths: Widths, capability: Capability = (9, 0)) -> list[tuple]:
    """Each width and number of tokens, in every shape that `decode_shape` returns for some GPU; and for the other
    activations in those for this one."""
    if dtype.itemsize != 2:
        return []
    wide = [(rows, (bands, *_SHAPES[rows][1:])) for rows in (32, 64) for bands in (2, 3)]
    narrow = [(rows, _SHAPES[rows]) for rows in (1, 8, 16)]
    own = [*narrow, *(wide if capability[0] in (9, 10) else _SMALLER.items())]
    others = sorted({activation(kind) for kind in ACTIVATIONS} - {()}) + [activation("relu", both=True)]
    built = [(shape, ()) for shape in (*narrow, *wide, *_SMALLER.items())]
    built += [(shape, acts) for acts in others for shape in own]
    widths = [width for width in widths if width % 8 == 0]
    return [decode(dtype, width, *shape, acts)[0] for width in widths for shape, acts in built]


def kept_inputs_every(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values and each number of tokens: the product into d_model, and for each activation without a
    threshold of its own gate and up together, and up alone."""
    kinds = [kind for kind in ACTIVATIONS if kind != "above"]
    made = [(False, None), *((paired, kind) for kind in kinds for paired in (True, False))]
    found = [kept_inputs(dtype, tokens, *each) for tokens in (1, 4) for each in made]
    return found if dtype.itemsize == 2 else []


def block_tiles(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values, each tile that `blocks` returns."""
    return [blocks(dtype, *tile)[0] for tile in _BLOCK_TILES] if dtype.itemsize == 2 else []


def int8_tiles(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values, each tile for this GPU, of one weight and of two."""
    if dtype.itemsize != 2:
        return []
    return [int8(dtype, gated, tile, capability)[0] for gated in (False, True) for tile in INT8_TILES]


def hopper_pack(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """Each version, with a bias and without one; version 0 does not pack."""
    return [
        (*each, ("BIAS", bias), ("VERSION", version))
        for each in sixteen_bits(dtype)
        for bias in (0, 1)
        for version in (0, *PACK_VERSIONS)
    ]


def listed(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """As `gated_or_plain`, for few blocks on a multiprocessor and for many."""
    return [macros for each in gated_or_plain(dtype) for macros in (each, (*each, ("RESIDENT", 4)))]


def clusters(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values, with the cluster size of the source."""
    size = ("CLUSTER", sources.number("sm90_mainloop.cuh", "CLUSTER"))
    return [(*each, size) for each in sixteen_bits(dtype)]


def clusters_gated_or_plain(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """As `clusters`, for a gated and for a plain layer."""
    return [(*macros, ("GATED", gated)) for macros in clusters(dtype) for gated in (0, 1)]


def microtiles(dtype: torch.dtype, widths: Widths = (), capability: Capability = (9, 0)) -> list[tuple]:
    """For 16-bit values, each height of a tile."""
    return [microtile(dtype, rows) for rows in MICROTILE_ROWS] if dtype.itemsize == 2 else []
