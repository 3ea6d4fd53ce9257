"""The steps of a block are decoded as they were recorded, and replaying them gives what the kernel computed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator import modelled
from tests.simulator.modelled import READ, WRITE, Block, Line
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.formats import TwELL
from twell_lab.simulator.report import ArrayInfo
from twell_lab.simulator.trace import Trace


def gate(rows: int = 1, columns: int = 512, seed: int = 0) -> np.ndarray:
    return modelled.rounded(np.random.default_rng(seed).standard_normal((rows, columns)) - 1.5)


def traced(block: Block, truncated: bool = False) -> Trace:
    raw = block.raw()
    return Trace.of(
        raw["steps"], raw["lanes"], block.lines, block.arrays, block.names, (block.threads, 1, 1), truncated
    )


def test_a_step_says_who_did_what_where():
    values = np.full((1, 256), -1.0, np.float32)
    values[0, [33, 34, 40]] = 1.0, 2.5, 3.0
    trace = traced(modelled.pack_v2(values, 256, 32))
    read = trace[3]
    assert (read.kind, read.array, read.space, read.warp, read.line.number) == ("read", "gate", "global", 0, 63)
    assert read.threads == tuple(range(32)) and read.elements == tuple(range(32, 64)) and read.count == 1
    assert read.values[:3] == (-1.0, 1.0, 2.5)
    assert read.describe() == "warp 0, smxx_pack.cu:63: 32 lanes read gate[32..63]"
    vote = trace[4]
    assert vote.kind == "warp" and vote.array is None and vote.elements == (None,) * 32
    assert vote.values == (0b100000110,) * 32 and vote.describe().endswith(
        "32 lanes take part in __ballot_sync, all get 262 (0x106)"
    )
    write = trace[5]
    assert (write.kind, write.threads, write.elements) == ("write", (1, 2, 8), (1, 2, 3))
    assert write.describe() == "warp 0, smxx_pack.cu:67: 3 lanes write packed[1..3]"
    assert write.values == (0x3F80_0021, 0x4020_0022, 0x4040_0028)  # 1 in column 33, 2.5 in 34, 3 in 40
    watch = trace[6]
    assert (watch.kind, watch.name, watch.values[0]) == ("watch", "count", 3.0)
    assert watch.describe() == "warp 0, smxx_pack.cu:68: count is 3 in 32 lanes"
    last = trace.steps[-1]
    assert last.describe() == "warp 0, smxx_pack.cu:70: thread 0 writes packed[0] = 3"


@settings(max_examples=15)
@given(st.integers(0, 50), st.sampled_from(["pack_v1", "pack_v2"]), st.sampled_from([4, 32]))
def test_replaying_every_step_gives_what_was_packed(seed, kernel, words):
    values = gate(seed=seed)
    block = getattr(modelled, kernel)(values, 256, words)
    trace = traced(block)
    end = trace.at(len(trace) - 1)
    assert np.array_equal(end["gate"].data, values) and not end["gate"].mask.any()
    assert np.array_equal(end["packed"].data.reshape(-1).view(np.uint8), block.memory[1])
    packed = TwELL.from_dense(torch.from_numpy(values).clamp(min=0).to(torch.bfloat16), 256, words)
    assert end["packed"][..., 0].tolist() == packed.counts.tolist()
    mine, theirs = end["packed"][0, 0].tolist(), packed.packed[0, 0].tolist()
    used = min(mine[0], words - 1) + 1
    assert mine[:used] == theirs[:used]
    assert not trace.at(-1)["packed"].any()


def test_shared_memory_is_masked_until_it_is_written():
    x = np.arange(64.0)
    trace = traced(modelled.block_sum(x))
    assert trace.at(-1)["part"].mask.all()
    first_warp = trace.at(trace.barriers[0] - 2)["part"]  # both warps have written, neither has met the other
    assert not first_warp.mask.any()
    half = trace.at(1)["part"]
    assert not half.mask[:32].any() and half.mask[32:].all() and half[:32].tolist() == x[:32].tolist()
    end = trace.at(len(trace) - 1)
    assert end["y"].tolist() == (x[:32] + x[32:]).tolist()
    assert set(end) == {"x", "y", "part"}


def test_barriers_are_where_the_last_warp_arrives():
    trace = traced(modelled.block_sum(np.arange(64.0)))
    steps = [step.index for step in trace if step.kind == "barrier"]
    assert len(steps) == 4 and trace.barriers == [steps[1], steps[3]]
    assert trace[steps[0]].describe() == "warp 0, sum.cu:4: 32 lanes wait at the barrier"
    assert traced(modelled.pack_v2(gate(), 256, 32)).barriers == []


def test_who_reads_and_who_writes():
    trace = traced(modelled.block_sum(np.arange(64.0)))
    assert trace.writes("part") == {i: (i,) for i in range(64)}
    assert trace.reads("part") == {i: (i % 32, i % 32 + 32) for i in range(64)}
    assert trace.writes("y") == trace.reads("y") == {i: (i, i + 32) for i in range(32)}  # atomics do both
    assert trace.writes("x") == {}


def test_watched_values_are_the_last_ones():
    trace = traced(modelled.pack_v2(gate(), 256, 32))
    first = next(step.index for step in trace if step.kind == "watch")
    assert trace.at(first - 1).watched == {}
    assert trace.at(first).watched == {"count": dict.fromkeys(range(32), trace[first].values[0])}
    kept = (gate().reshape(2, 256) > 0).sum(1)
    assert trace.at(len(trace) - 1).watched["count"] == {t: kept[t // 32] for t in range(64)}


LINES = {1: Line("toy.cu", 1, "toy", "toy")}


def toy(*arrays: ArrayInfo) -> Block:
    return Block(32, LINES, list(arrays))


def test_vectors_cover_several_elements():
    values = np.arange(16.0, dtype=np.float32)
    block = toy(ArrayInfo("x", "global", "bfloat16", (2, 8), modelled.bf16_bytes(values)))
    block.access(READ, "x", [1], {0: 0, 1: 8}, count=8)
    trace = traced(block)
    assert trace[0].elements == (0, 8) and trace[0].count == 8
    assert trace[0].values == (tuple(range(8)), tuple(range(8, 16)))
    assert trace[0].describe() == "warp 0, toy.cu:1: 2 lanes read x[0..15]"
    assert trace.reads("x") == {i: (i // 8,) for i in range(16)}
    assert trace.at(0).last("x").thread.tolist() == [0] * 8 + [1] * 8


def test_a_part_of_an_element():
    block = toy(ArrayInfo("x", "global", np.dtype("u8"), (2,), np.arange(2, dtype=np.uint64).view(np.uint8)))
    block._step([1], READ, 1, 4, [(5, 0, 8, (7).to_bytes(4, "little"))])
    step = traced(block)[0]
    assert (step.elements, step.count, step.values) == ((1,), 0, (7,)) and step.covered == (1,)


def test_lanes_with_different_arrays_or_none():
    a, b = (ArrayInfo(name, "global", np.dtype("f4"), (4,), np.zeros(16, np.uint8)) for name in "ab")
    block = toy(a, b)
    one = np.float32(1).tobytes()
    block._step([1], WRITE, 1, 4, [(0, 0, 4, one), (1, 1, 8, one), (2, -1, 0, one)])
    block._step([1], READ, 1, 4, [(0, -1, 0, (9).to_bytes(4, "little"))])
    trace = traced(block)
    assert trace[0].array is None and trace[0].arrays == ("a", "b", None) and trace[0].elements == (1, 2, None)
    assert trace[0].describe().endswith("3 lanes write a and b")
    assert trace.writes("a") == {1: (0,)} and trace.writes("b") == {2: (1,)}
    assert trace.at(0)["a"].tolist() == [0, 1, 0, 0] and trace.at(0)["b"].tolist() == [0, 0, 1, 0]
    assert trace[1].values == (9,) and trace[1].describe().endswith("thread 0 reads memory outside the arrays")


def test_of_two_writes_the_later_one_stays():
    block = toy(ArrayInfo("x", "global", np.dtype("i4"), (2,), np.zeros(8, np.uint8)))
    block.access(WRITE, "x", [1], {0: 0}, {0: 5})
    block.access(WRITE, "x", [1], {3: 0}, {3: -1 % 2**32})
    trace = traced(block)
    assert [trace.at(step)["x"][0] for step in (-1, 0, 1)] == [0, 5, -1]


def test_nothing_traced_and_what_is_refused():
    empty = Trace.of(np.zeros(0, modelled.STEPS), np.zeros(0, modelled.LANES), {}, [], (), (32, 1, 1))
    assert len(empty) == 0 and empty.barriers == [] and not empty.truncated and list(empty.at(-1)) == []
    trace = traced(modelled.pack_v2(gate(), 256, 32), truncated=True)
    assert trace.truncated and trace.block_shape == (64, 1, 1)
    for call, named in (
        (lambda: trace.at(len(trace)), str(len(trace))),
        (lambda: trace.at(-2), "-2"),
        (lambda: trace.at(0)["x"], "gate, packed"),
        (lambda: trace.writes("x"), "'x'"),
    ):
        with pytest.raises(InputError, match=named):
            call()


STOPPED = {  # kernel: (what it does, the block that stops, the last of its steps before, the words of the fault)
    "race": ("__shared__ int s[64]; s[t] = x[t]; a[t] = s[63 - t];", 0, "thread 32 reads x[32] = 32", "writes s[32]"),
    "past": ("a[64 * blockIdx.x + t] = 1;", 2, "30 lanes write a[160..189]", "out of bounds"),
    "first": ("a[200 + t] = 1;", 0, None, "out of bounds"),
    "barrier": (
        "if (t < 32) __syncthreads(); a[t] = 1; __syncthreads();",
        0,
        "32 lanes write a[32..63]",
        "wait for each",
    ),
    "unwritten": (
        "__shared__ int s[64]; a[t] = s[t];",
        0,
        "32 lanes write a[32..63]",
        "no thread of the block has written",
    ),
    "endless": ("while (a[1] == 0) a[0] = 1;", 0, None, "took longer"),
}


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_the_steps_end_at_the_fault(tmp_path):
    kernels = (
        f'extern "C" __global__ void {name}(int* a, const int* x) {{ int t = threadIdx.x; {body} }}\n'
        for name, (body, *_) in STOPPED.items()
    )
    (tmp_path / "k.cu").write_text("".join(kernels))
    program = simulator.compile(tmp_path / "k.cu")
    for name, (_, block, before, words) in STOPPED.items():
        a, x = np.zeros(190, np.int32), np.arange(64, dtype=np.int32)
        trace = simulator.step(
            program, name, 3 if name == "past" else 1, 64, (a, x), seconds=0.5 if name == "endless" else 20
        )
        assert trace.fault.trace is trace and trace.fault.block == block and not a.any(), name
        assert trace[-1].kind == "fault" and words in trace[-1].describe(), name
        assert before is None or trace[-2].describe().endswith(before), (name, trace[-2].describe())
        assert trace[-1].index in trace.of_thread(trace.fault.thread)


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_without_a_fault_the_steps_are_those_of_the_block_asked_for(tmp_path):
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(int* a) { a[blockIdx.x] = 7; }')
    trace = simulator.step(simulator.compile(tmp_path / "k.cu"), "k", 3, 1, (np.zeros(3, np.int32),), look=2)
    assert trace.fault is None and [step.describe().split(": ")[1] for step in trace] == ["thread 0 writes a[2] = 7"]
    for look in (None, True, 0.5, -1):
        with pytest.raises(InputError, match=f"look is {look}; the number of a block"):
            simulator.step(simulator.compile(tmp_path / "k.cu"), "k", 3, 1, (np.zeros(3, np.int32),), look=look)
