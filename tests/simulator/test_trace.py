"""The steps of a block are decoded as they were recorded, and replaying them gives what the kernel computed."""

import numpy as np
import pytest
import torch

from tests.simulator.recorded import block_sum, gate, pack
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.formats import TwELL
from twell_lab.simulator.report import LANES, STEPS
from twell_lab.simulator.trace import Trace

if not simulator.available():
    pytest.skip("needs a C++ compiler", allow_module_level=True)


def line(text: str) -> int:
    """The number of the one line of kernels/smxx_pack.cu, in pack_v2, that holds a text."""
    source = simulator.compile("smxx_pack.cu", {"VALUE_BF16": True}).sources["smxx_pack.cu"].split("\n")
    start = next(i for i, row in enumerate(source) if row.startswith("pack_v2"))
    return next(i for i, row in enumerate(source, 1) if i > start and text in row)


def test_a_step_says_who_did_what_where():
    values = -torch.ones(1, 256)
    values[0, [33, 34, 40]] = torch.tensor([1.0, 2.5, 3.0])
    trace = pack(2, values).trace
    read = trace[3]
    assert (read.kind, read.array, read.space, read.warp) == ("read", "gate", "global", 0)
    assert read.threads == tuple(range(32)) and read.elements == tuple(range(32, 64)) and read.count == 1
    assert read.values[:3] == (-1.0, 1.0, 2.5)
    assert read.describe() == f"warp 0, smxx_pack.cu:{line('in[c]')}: 32 lanes read gate[32..63]"
    vote = trace[4]
    assert vote.kind == "warp" and vote.array is None and vote.elements == (None,) * 32
    assert vote.values == (0b100000110,) * 32 and vote.describe().endswith(
        "32 lanes take part in __ballot_sync, all get 262 (0x106)"
    )
    write = trace[5]
    assert (write.kind, write.threads, write.elements) == ("write", (1, 2, 8), (1, 2, 3))
    assert write.describe() == f"warp 0, smxx_pack.cu:{line('words) out')}: 3 lanes write packed[1..3]"
    assert write.values == (0x3F80_0021, 0x4020_0022, 0x4040_0028)  # 1 in column 33, 2.5 in 34, 3 in 40
    watch = trace[6]
    assert (watch.kind, watch.name, watch.values[0]) == ("watch", "count", 3.0)
    assert watch.describe() == f"warp 0, smxx_pack.cu:{line('count +=')}: count is 3 in 32 lanes"
    last = trace.steps[-1]
    assert last.describe() == f"warp 0, smxx_pack.cu:{line('out[0] =')}: thread 0 writes packed[0] = 3"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("words", [4, 32])
def test_replaying_every_step_gives_what_was_packed(version, words):
    values = gate()
    trace = pack(version, values, words).trace
    end = trace.at(len(trace) - 1)
    assert np.array_equal(end["gate"].data, values.float()) and not end["gate"].mask.any()
    packed = TwELL.from_dense(values.clamp(min=0), 256, words)
    assert end["packed"][..., 0].tolist() == packed.counts.tolist()
    for mine, theirs in zip(end["packed"][0].tolist(), packed.packed[0].tolist(), strict=True):
        used = min(mine[0], words - 1) + 1
        assert mine[:used] == theirs[:used]
    assert not trace.at(-1)["packed"].any()


def test_shared_memory_is_masked_until_it_is_written():
    x = np.arange(64.0)
    trace = block_sum(x).trace
    assert trace.at(-1)["part"].mask.all()
    first_warp = trace.at(trace.barriers[0] - 2)["part"]  # both warps have written, neither has met the other
    assert not first_warp.mask.any()
    half = trace.at(trace.touching("part")[0].index)["part"]
    assert not half.mask[:32].any() and half.mask[32:].all() and half[:32].tolist() == x[:32].tolist()
    end = trace.at(len(trace) - 1)
    assert end["y"].tolist() == (x[:32] + x[32:]).tolist()
    assert set(trace.arrays) == {"x", "y", "part"}


def test_barriers_are_where_the_last_warp_arrives():
    trace = block_sum().trace
    steps = [step.index for step in trace if step.kind == "barrier"]
    assert len(steps) == 4 and trace.barriers == [steps[1], steps[3]]
    assert trace[steps[0]].describe() == "warp 0, sum.cu:6: 32 lanes wait at the barrier"
    assert pack(2, gate()).trace.barriers == []


def test_who_reads_and_who_writes():
    trace = block_sum().trace
    assert trace.writes("part") == {i: (i,) for i in range(64)}
    assert trace.reads("part") == {i: (i % 32, i % 32 + 32) for i in range(64)}
    assert trace.writes("y") == trace.reads("y") == {i: (i, i + 32) for i in range(32)}  # atomics do both
    assert trace.writes("x") == {}


def test_watched_values_are_the_last_ones():
    trace = pack(2, gate()).trace
    first = next(step.index for step in trace if step.kind == "watch")
    assert trace.at(first - 1).watched == {}
    assert trace.at(first).watched == {"count": dict.fromkeys(range(32), trace[first].values[0])}
    kept = (gate().view(2, 256) > 0).sum(1).tolist()
    assert trace.at(len(trace) - 1).watched["count"] == {t: kept[t // 32] for t in range(64)}


TOYS = """
extern "C" __global__ void vectors(const __nv_bfloat16* x) {
    if (threadIdx.x < 2) const uint4 v = ((const uint4*)x)[threadIdx.x];
}
extern "C" __global__ void part(const unsigned long long* x) {
    if (threadIdx.x == 5) const unsigned v = ((const unsigned*)x)[2];
}
extern "C" __global__ void several(float* a, float* b) {
    float* mine = threadIdx.x == 0 ? a : b;
    if (threadIdx.x < 2) mine[threadIdx.x + 1] = 1;
}
extern "C" __global__ void later(int* x) {
    if (threadIdx.x == 0) x[0] = 5;
    __syncwarp();
    if (threadIdx.x == 3) x[0] = -1;
}
"""


@pytest.fixture
def toy(tmp_path):
    """A function that gives the steps of a kernel of TOYS, and those at memory alone."""
    (tmp_path / "toy.cu").write_text("#include <cuda_bf16.h>\n" + TOYS)

    def trace(kernel: str, *arguments):
        whole = simulator.compile(tmp_path / "toy.cu").launch(kernel, 1, 32, arguments, trace=0).trace
        return whole, [step for step in whole if step.kind in ("read", "write")]

    return trace


def test_vectors_cover_several_elements(toy):
    trace, (read, *_) = toy("vectors", torch.arange(16.0).bfloat16().view(2, 8))
    assert read.elements == (0, 8) and read.count == 8
    assert read.values == (tuple(range(8)), tuple(range(8, 16)))
    assert read.describe() == "warp 0, toy.cu:4: 2 lanes read x[0..15]"
    assert trace.reads("x") == {i: (i // 8,) for i in range(16)}
    assert trace.at(len(trace) - 1).last("x").thread.tolist() == [0] * 8 + [1] * 8


def test_a_part_of_an_element(toy):
    _, (step,) = toy("part", torch.tensor([1, 7]))
    assert (step.elements, step.count, step.values) == ((1,), 0, (7,)) and step.covered == (1,)


def test_lanes_with_different_arrays(toy):
    trace, (step,) = toy("several", torch.zeros(4), torch.zeros(4))
    assert step.array is None and step.arrays == ("a", "b") and step.elements == (1, 2)
    assert step.describe().endswith("2 lanes write a and b")
    assert trace.writes("a") == {1: (0,)} and trace.writes("b") == {2: (1,)}
    end = trace.at(len(trace) - 1)
    assert end["a"].tolist() == [0, 1, 0, 0] and end["b"].tolist() == [0, 0, 1, 0]


def test_of_two_writes_the_later_one_stays(toy):
    trace, (first, second) = toy("later", torch.zeros(2, dtype=torch.int32))
    assert [trace.at(step)["x"][0] for step in (-1, first.index, second.index)] == [0, 5, -1]


def test_nothing_traced_and_what_is_refused():
    empty = Trace(np.zeros(0, STEPS), np.zeros(0, LANES), {}, [], (), (32, 1, 1))
    assert len(empty) == 0 and empty.barriers == [] and not empty.truncated and empty.arrays == {}
    trace = pack(2, gate()).trace
    assert not trace.truncated and trace.block_shape == (64, 1, 1)
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
    "barrier": ("if (t < 32) __syncthreads(); a[t] = 1; __syncthreads();", 0, "lanes write a[32..63]", "wait for each"),
    "unwritten": (
        "__shared__ int s[64]; a[t] = s[t];",
        0,
        "lanes write a[32..63]",
        "no thread of the block has written",
    ),
    "endless": ("while (a[1] == 0) a[0] = 1;", 0, None, "took longer"),
}


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


def test_without_a_fault_the_steps_are_those_of_the_block_asked_for(tmp_path):
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(int* a) { a[blockIdx.x] = 7; }')
    trace = simulator.step(simulator.compile(tmp_path / "k.cu"), "k", 3, 1, (np.zeros(3, np.int32),), look=2)
    assert trace.fault is None and [step.describe().split(": ")[1] for step in trace] == ["thread 0 writes a[2] = 7"]
    for look in (True, 0.5, -1):
        with pytest.raises(InputError, match=f"trace is {look}; a block number"):
            simulator.step(simulator.compile(tmp_path / "k.cu"), "k", 3, 1, (np.zeros(3, np.int32),), look=look)


def test_a_trace_names_the_lanes_that_had_left_before_an_operation_that_names_them(tmp_path):
    """No fault: a lane that has left votes no. Lanes of a partial mask, and lanes that a narrow block has not, are none."""
    file = tmp_path / "votes.cu"
    file.write_text(
        'extern "C" __global__ void votes(int* out, int n, unsigned mask) {\n'
        "    if (threadIdx.x % 32 < n) out[threadIdx.x] = __popc(__ballot_sync(mask, 1));\n}\n"
    )

    def absent(threads: int, n: int, mask: int) -> list[tuple[int, ...]]:
        out = torch.zeros(threads, dtype=torch.int32)
        trace = simulator.compile(file).launch("votes", 1, threads, (out, n, mask), trace=0).trace
        return [step.absent for step in trace if step.kind == "warp"]

    every = 2**32 - 1
    assert absent(64, 30, every) == [(30, 31), (62, 63)] and absent(64, 32, every) == [(), ()]
    assert absent(32, 5, 0b11111) == [()] and absent(32, 5, 0b1011111) == [(6,)] and absent(20, 20, every) == [()]
