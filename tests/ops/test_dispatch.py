"""Which kernels a layer's call launches, written for a GPU that need not be there: a program needs no memory."""

import pytest
import torch

from twell_lab.cuda import launch
from twell_lab.cuda.launch import Layout
from twell_lab.ops import dispatch
from twell_lab.ops.activation import RELU, Activation

HOPPER, AMPERE = (9, 0), (8, 0)


def kernels(
    monkeypatch, gpu, tokens, d_model, d_ff, *, path="twell", hot=0, gated=True, dtype=torch.bfloat16, acts=RELU
):
    """The names of the kernels, in order; "torch" where torch's operations compute it."""
    for module in (launch, dispatch):
        monkeypatch.setattr(module, "capability", lambda index: gpu)
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 132)
    row = Layout((d_ff, d_model), (d_model, 1), dtype, 0)
    weights = (row if gated else None, row, Layout((d_model, d_ff), (1, d_model), dtype, 0), None, None, None)
    x = Layout((tokens, d_model), (d_model, 1), dtype, 0)
    made = dispatch._prepared.__wrapped__(torch.device("cuda", 0), x, weights, path, hot, 256, 32, acts)
    call = made if isinstance(made, launch.Call) else getattr(made, "call", None)
    return ["torch"] if call is None else [each.kernel.name for each in call._launches]


PACKED = ["gate_pack_v3", "up_v1", "down_v6", "gate_up", "down_rows"]
TABLE = (
    (HOPPER, 1, 2048, 5632, {}, ["decode_gate_v2", "decode_down"]),
    (HOPPER, 16, 2048, 5632, {}, ["decode_gate_v2", "decode_down"]),
    (HOPPER, 17, 2048, 5632, {}, ["spread_up", "spread_down"]),
    (HOPPER, 64, 2048, 5632, {"gated": False}, ["spread_up", "spread_down"]),
    (HOPPER, 64, 2048, 5636, {}, ["decode_gate_v2", "decode_down"]),
    (HOPPER, 64, 2048, 5632, {"acts": Activation("above", 0.1)}, ["decode_gate_v2", "decode_down"]),
    (HOPPER, 97, 2048, 5632, {}, ["listed_v2", "listed_heavy"]),
    (HOPPER, 2048, 2048, 5632, {}, ["gate_pack_v3", "gated_v5", "gate_up", "down_rows"]),
    (HOPPER, 16384, 2048, 5632, {}, PACKED),
    (HOPPER, 16384, 2048, 5632, {"path": "hot_cold", "hot": 512}, ["gate_up", "down_sums", *PACKED]),
    (HOPPER, 40000, 2048, 5632, {}, [*PACKED, "gate_up", "down_rows", *PACKED]),
    (HOPPER, 16384, 2048, 5632, {"path": "dense"}, ["gate_up"]),
    (HOPPER, 100, 2048, 5632, {"path": "dense"}, ["torch"]),
    (HOPPER, 1, 100, 300, {"dtype": torch.float32}, ["pack_v4", "gated_v4"]),
    (HOPPER, 16384, 100, 301, {"dtype": torch.float32}, ["pack_v2", "gated_v3"]),
    (AMPERE, 1, 2048, 5632, {}, ["decode_gate_v2", "decode_down"]),
    (AMPERE, 16384, 2048, 5632, {}, ["pack_v4", "gated_v3"]),
    ((7, 5), 1, 2048, 5632, {"dtype": torch.float16}, ["spread_up", "spread_down"]),
    (HOPPER, 100, 2048, 5632, {"acts": Activation("silu", 0.1)}, ["torch"]),
    (HOPPER, 10, 2048, 5632, {"acts": Activation("silu", 0.1)}, ["decode_gate_v2", "decode_down"]),
)


@pytest.mark.parametrize("gpu, tokens, d_model, d_ff, how, wanted", TABLE)
def test_the_kernels_of_a_call(monkeypatch, gpu, tokens, d_model, d_ff, how, wanted):
    assert kernels(monkeypatch, gpu, tokens, d_model, d_ff, **how) == wanted


def test_scratch_overlaps_only_where_it_is_free():
    call = launch.Call(torch.device("cuda", 0))
    source = launch.Source("none", {"k": launch.Entry(32, "pp")}, builds=launch.each_type)
    x = call.input(Layout((4,), (1,), torch.float32, 0))
    a, b, c = (call.empty(1000, dtype=torch.float32) for _ in range(3))
    for pair in ((x, a), (a, b), (b, c)):
        call.launch(source.kernel("k", ()), (1, 1), *pair)
    offsets, size = launch._packed_scratch({t.number: t.nbytes for t in (a, b, c)}, call._launches)
    assert offsets[a.number] == offsets[c.number] != offsets[b.number] and size == 2 * 4096
