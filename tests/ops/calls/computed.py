"""Computes what is launched: portable kernels in the simulator, as is one with C++ in the place of its PTX; the others in
a few lines of torch.

It reads and writes the memory at the addresses in the arguments, as a GPU does, so a wrong argument gives a wrong
result."""

import ctypes
import struct
from pathlib import Path

import torch
from torch.nn.functional import linear

from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.cuda import macros, sources
from twell_lab.formats import packed_and_pool
from twell_lab.ops import train_lost
from twell_lab.ops.activation import Activation
from twell_lab.simulator import program

BY_TYPE = {"float": torch.float32, "__nv_bfloat16": torch.bfloat16, "__half": torch.float16}
FEW_ROWS = Path(__file__).parents[2] / "simulator/few_rows.cu"
MOST_FEW = sources.number("few_rows.cuh", "FEW_ROWS")
INTEGERS = {1: torch.uint8, 4: torch.int32, 8: torch.int64}


def at(address: int, dtype: torch.dtype, *shape: int, stride: int | None = None) -> torch.Tensor | None:
    """The tensor that lies there; stride: values from one row to the next."""
    if not address:
        return None
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    stride = columns if stride is None else stride
    room = (ctypes.c_uint8 * (((rows - 1) * stride + columns) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(room, dtype=dtype).as_strided(shape, (stride, 1) if len(shape) == 2 else (1,))


def matrix(given: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that a map of pretended.map_of describes."""
    address, _, d, n, stride = [int.from_bytes(given[8 * i : 8 * i + 8], "little") for i in range(5)]
    return at(address, dtype, n, d, stride=stride // dtype.itemsize)


def compute(seen) -> None:
    """Do what this launch of fake_driver.Launch asks for."""
    defines, values = dict(seen.defines), seen.values()
    dtype = torch.bfloat16 if "VALUE_BF16" in defines else torch.float16
    if seen.name.startswith("gate_pack"):
        gate_pack(seen.file, dtype, defines, values)
    elif seen.name == "gate_up":
        gate_up(dtype, defines, values, seen.grid[0])
    elif seen.name == "down_sums":
        down_sums(dtype, values)
    elif seen.name == "down_rows":
        down_rows(dtype, values, seen.grid[0])
    elif seen.name == "decode_gate_v2":
        decode_gate(dtype, defines, values)
    elif seen.name == "decode_down":
        decode_down(dtype, defines["D_MODEL"], seen.grid[1], values)
    else:
        simulate(seen, defines, values)


def gate_pack(file, dtype, defines, values) -> None:
    *_, tokens, d_model, d_ff = values
    if file.startswith("sm90"):
        x, gate = matrix(values[0], dtype), at(int.from_bytes(values[1][:8], "little"), dtype, d_ff, d_model)
        packed, bias, pool, lost = values[3:7]
    else:
        x, gate = at(values[0], dtype, tokens, d_model), at(values[1], dtype, d_ff, d_model)
        bias, packed, pool, lost = values[2:6]
    assert x.shape == (tokens, d_model)
    words, beside, _ = packed_and_pool(linear(x, gate, at(bias, dtype, d_ff)))
    at(packed, torch.int32, words.numel()).copy_(words.flatten())
    at(pool, torch.int32, beside.numel()).copy_(beside.flatten())
    if lost:
        at(lost, torch.int32, 1).zero_()


def few(lost, d_ff, d_model, dtype, blocks, entry, arguments) -> bool:
    """Whether few rows are listed, which are then computed in the simulator, by `entry` of FEW_ROWS."""
    count = int(at(lost, torch.int32, 1))
    listed = at(lost, torch.int32, 1 + count)[1:]
    if not 0 < count <= min(MOST_FEW, blocks) or (listed < 0).any():
        return False
    program = simulator.compile(FEW_ROWS, dict((*macros.value(dtype), ("MOST_D_MODEL", d_model))))
    program.launch(entry, blocks, 96, placed(program.kernels[entry], arguments), watch=None)
    return True


def gate_up(dtype, defines, values, blocks) -> None:
    x, gate, up, h = (matrix(v, dtype) for v in values[:4])
    gate_bias, up_bias, lost, first, rows, d_model, d_ff, counters, counted, *apart = values[4:]
    packed, pool, lost_x, up_rows, up_step, down_rows, down_step, parts = apart
    if packed:
        first_row = up_rows if defines["GATED"] else 0
        weights = (first_row, up_step, up_bias, down_rows, down_step)
        if few(
            lost, d_ff, d_model, dtype, blocks, "sum_runs", (lost_x, packed, pool, lost, *weights, parts, d_ff, d_model)
        ):
            return
    rows = min(rows, int(at(lost, torch.int32, 1)) - first) if lost else rows
    if rows <= 0:
        return
    x = x[first : first + rows]
    u = linear(x, up, at(up_bias, dtype, d_ff))
    made = torch.relu(linear(x, gate, at(gate_bias, dtype, d_ff))) * u if defines["GATED"] else torch.relu(u)
    h[:rows].copy_(made)
    if counted:
        at(counters, torch.int32, counted).zero_()


def down_sums(dtype, values) -> None:
    h, down_t = (matrix(v, dtype) for v in values[:2])
    sums, rows, d_ff, d_model = values[2:]
    at(sums, torch.float32, rows, d_model).copy_(h[:, :d_ff].float() @ down_t.float())


def down_rows(dtype, values, blocks) -> None:
    h, down_t = (matrix(v, dtype) for v in values[:2])
    bias, start, y, lost, first, slots, d_ff, d_model, counters, parts, apart = values[2:]
    if apart and few(lost, d_ff, d_model, dtype, blocks, "add_all_runs", (parts, lost, bias, start, y, d_ff, d_model)):
        return
    count = int(at(lost, torch.int32, 1))
    rows = min(slots, count - first)
    if rows <= 0:
        return
    assert not at(counters, torch.int32, 8).any()
    for i, row in enumerate(at(lost, torch.int32, 1 + count)[1 + first :][:rows].tolist()):
        row = ~row if row < 0 else row
        made = linear(h[i].float(), down_t.float().t(), None if not bias else at(bias, dtype, d_model).float())
        made += at(start + 4 * row * d_model, torch.float32, d_model) if start else 0
        at(y + row * d_model * dtype.itemsize, dtype, d_model).copy_(made)


BAND = sources.number("sm80_decode.cu", "BAND")  # neurons whose bits are in one mask


def decode_gate(dtype, defines, values) -> None:
    x, first, first_bias, second, second_bias, _, (masks, places), stats, tokens, d_ff, bits = values
    d_model, bands = defines["D_MODEL"], -(-d_ff // BAND)
    kind = next((kind for kind, macro in macros.ACTIVATIONS.items() if macro and macro in defines), "relu")
    acts = Activation(kind, struct.unpack("f", struct.pack("I", bits))[0], "BOTH" in defines)
    x = at(x, dtype, tokens, d_model)
    first = linear(x, at(first, dtype, d_ff, d_model), at(first_bias, dtype, d_ff))
    fired, h = acts.keeps(first), acts.applied(first).float()
    if second:
        h *= acts.of_up(linear(x, at(second, dtype, d_ff, d_model), at(second_bias, dtype, d_ff))).float()
    room = bands * BAND - d_ff
    bits = torch.nn.functional.pad(fired, (0, room)).view(tokens, bands, BAND) << torch.arange(BAND)
    at(masks, torch.int16, tokens, bands).copy_(bits.sum(2))
    at(places, torch.float32, tokens, bands * BAND).copy_(torch.nn.functional.pad(h, (0, room)))
    if stats:
        at(stats, torch.int64, 2).add_(torch.tensor([tokens, int(fired.sum())]))


def decode_down(dtype, d_model, tokens, values) -> None:
    (masks, places), down_t, bias, y, bands = values
    bits = at(masks, torch.int16, tokens, bands)[..., None] >> torch.arange(BAND) & 1
    h = torch.where(bits.flatten(1) == 1, at(places, torch.float32, tokens, bands * BAND), 0.0)
    rows = 1 + int(bits.flatten(1).any(0).nonzero().flatten()[-1:].sum())  # as far as a neuron fires
    made = h[:, :rows] @ at(down_t, dtype, rows, d_model).float()
    at(y, dtype, tokens, d_model).copy_(made if not bias else made + at(bias, dtype, d_model).float())


def simulate(seen, defines, values) -> None:
    if seen.file == train_lost.TENSOR_FILE:
        made = simulator.compile(without_ptx(seen.file), defines)
        arguments = placed(made.kernels[seen.name], values)
        how = {"watch": None, "shared_bytes": sources.number(seen.file, "SHARED_BYTES")}
        return made.launch(seen.name, seen.grid[0], seen.block[0], arguments, **how)
    arguments = placed(simulator.compile(seen.file, defines).kernels[seen.name], values)
    program.launch(seen.file, seen.name, seen.defines, seen.grid[:2], seen.block[:1], arguments)


def placed(signature, values) -> list:
    """What the simulator takes, from what the driver was given."""
    arguments = []
    for parameter, value in zip(signature.parameters, values):
        if parameter.pointer:
            sized = {"int": 4, "unsigned": 4, "unsigned long long": 8}.get(parameter.type, 1)
            value = at(value, BY_TYPE.get(parameter.type.rstrip("24"), INTEGERS[sized]), 1)
        else:  # as read: unsigned
            value = value if value < 1 << 31 else value - (1 << 32)
        arguments.append(value)
    return arguments
