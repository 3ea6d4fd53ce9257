"""Each puzzle's check: the folded answer passes; what is handed out, typical mistakes and shortcuts are told."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.course.handed_out import edited, needs_a_compiler, with_body
from tests.course.puzzles.notebook_kernels import in_the_notebook
from twell_lab.core import CompileError, StackError
from twell_lab.course import exercises, puzzles
from twell_lab.course.capstone.gpu import cubin
from twell_lab.course.puzzles import data, slips
from twell_lab.course.verdicts import NotYet
from twell_lab.cuda import compile as compiler

HEAD = "const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"


class Verdict(NamedTuple):
    right: bool
    said: str


def judged(name: str, text: str, folder: Path) -> Verdict:
    file = folder / f"{name}.cu"
    file.write_text(text)
    try:
        return Verdict(True, puzzles.judge(name, file))
    except NotYet as reason:
        return Verdict(False, str(reason))


def changed(name: str, *changes: tuple[str, str]) -> str:
    """The answer with these pieces of text replaced; each must occur once."""
    return edited(in_the_notebook()[name][1], *changes)


def kernel(name: str, *edits: str | tuple[str, str]) -> str:
    """The kernel that is handed out with this body, or the answer with these pieces of text replaced."""
    return with_body(in_the_notebook()[name][0], edits[0]) if isinstance(edits[0], str) else changed(name, *edits)


# (puzzle, what is wrong) -> (words of what is said, what makes the kernel). "shortcut": right, and misses the point.
WRONG = {
    ("map", "shortcut"): (
        "thread 0 writes 32 places of out by itself",
        "if (threadIdx.x == 0) for (int i = 0; i < 32; ++i) out[i] = 2 * x[i];",
    ),
    ("guard", "none"): (
        "thread 5 of block 1 (number 37) read x[37], out of bounds: there are 37.",
        ("if (i < n) ", ""),
    ),
    ("guard", "shortcut"): (
        "2 warps store 37 times; each thread has one place of out, to be written once.",
        "if (blockIdx.x + threadIdx.x == 0) for (int i = 0; i < n; ++i) out[i] = 2 * x[i];",
    ),
    ("grid_stride", "step of a block"): (
        "both write out[32]; each place is one thread's. Is i the number in the whole grid?",
        ("i += threads", "i += blockDim.x"),
    ),
    ("grid_stride", "shortcut"): (
        "neighbouring threads should take neighbouring values",
        HEAD + "const int each = (n + gridDim.x * blockDim.x - 1) / (gridDim.x * blockDim.x);\n"
        "for (int k = i * each; k < (i + 1) * each && k < n; ++k) out[k] = 2 * x[k];",
    ),
    ("neighbours", "no barrier"): ("a barrier is missing: thread", ("__syncthreads();", "")),
    ("neighbours", "barrier within if"): (
        "and no barrier that both come to lies in between. Is one missing, or does it stand within an `if`",
        ("__syncthreads();", "if (t < 32) __syncthreads();"),
    ),
    ("neighbours", "shortcut"): (
        "a block reads x 190 times, and its row has 64 values",
        "const int t = threadIdx.x, i = blockIdx.x * 64 + t;\n"
        "out[i] = x[i] + (t > 0 ? x[i - 1] : 0.0f) + (t < 63 ? x[i + 1] : 0.0f);",
    ),
    ("block_sum", "barrier within if"): (
        "thread 0 comes to 6 barriers and thread 63 to 0: every thread has to come to each.",
        ("__syncthreads();\n", "\n"),
        ("if (t < half) part", "if (t < half) __syncthreads(), part"),
    ),
    ("block_sum", "added to the output"): (
        "out does not begin at 0: write it, do not add to it.",
        "atomicAdd(&out[blockIdx.x], x[blockIdx.x * 64 + threadIdx.x]);",
    ),
    ("block_sum", "shortcut"): (
        "thread 0 reads 64 values while the others wait",
        "if (threadIdx.x) return;\nfloat sum = 0;\n"
        "for (int k = 0; k < 64; ++k) sum += x[blockIdx.x * 64 + k];\nout[blockIdx.x] = sum;",
    ),
    ("block_sum", "shortcut by atomics"): (
        "atomics wait for each other",
        "__shared__ float sum;\nif (threadIdx.x == 0) sum = 0;\n__syncthreads();\n"
        "atomicAdd(&sum, x[blockIdx.x * 64 + threadIdx.x]);\n__syncthreads();\n"
        "if (threadIdx.x == 0) out[blockIdx.x] = sum;",
    ),
    ("ballot_count", "ballot of the lanes with a value"): (
        "lanes 27 to 31 are named in the mask of __ballot_sync and never come to it: let them vote no.",
        "if (threadIdx.x < width) {\n"
        "    const unsigned v = __ballot_sync(0xffffffffu, x[blockIdx.x * width + threadIdx.x] > 0);\n"
        "    if (threadIdx.x == 0) counts[blockIdx.x] = __popc(v);\n}",
    ),
    ("ballot_count", "all lanes write"): (
        "both write counts[0]; each place is one thread's. Is the index each thread's own? Or one alone has to write",
        ("if (lane == 0) counts", "counts"),
    ),
    ("ballot_count", "shortcut"): (
        "lane 0 reads 27 values",
        "int sum = 0;\nif (threadIdx.x) return;\n"
        "for (int k = 0; k < width; ++k) sum += x[blockIdx.x * width + k] > 0;\ncounts[blockIdx.x] = sum;",
    ),
    ("ballot_count", "shortcut by shuffles"): (
        "no lane votes: the warp-wide operations are __shfl_xor_sync",
        "int sum = threadIdx.x < width && x[blockIdx.x * width + threadIdx.x] > 0;\n"
        "for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);\n"
        "if (threadIdx.x == 0) counts[blockIdx.x] = sum;",
    ),
    ("prefix_sum", "shortcut"): (
        "lane 31 reads 32 values of x",
        "int sum = 0;\nfor (int k = 0; k <= threadIdx.x; ++k) sum += x[blockIdx.x * 32 + k];\n"
        "out[blockIdx.x * 32 + threadIdx.x] = sum;",
    ),
    ("prefix_sum", "shortcut lane by lane"): (
        "the warp comes to 32 shuffles",
        "const int lane = threadIdx.x, own = x[blockIdx.x * 32 + lane];\nint sum = 0;\n"
        "for (int k = 0; k < 32; ++k) {\n    const int v = __shfl_sync(0xffffffffu, own, k);\n"
        "    if (k <= lane) sum += v;\n}\nout[blockIdx.x * 32 + lane] = sum;",
    ),
    ("vector_loads", "shortcut"): (
        "load instructions; where each lane reads 16 bytes at once, 8 are enough",
        HEAD + "for (int k = i; k < n; k += gridDim.x * blockDim.x) out[k] = 2 * x[k];",
    ),
    ("neuron_counts", "no atomic"): (
        "one of them writes, and without an atomic nothing says which comes first.",
        ("atomicAdd(&counts[fired[i]], 1)", "counts[fired[i]] += 1"),
    ),
    ("neuron_counts", "shortcut"): (
        "entries of fired; one for each thread is asked",
        HEAD + "if (i == 0) for (int k = 0; k < n; ++k) counts[fired[k]] += 1;",
    ),
    ("gather_rows", "shortcut"): (
        "touch 80 sectors, and the values lie in 10",
        "if (threadIdx.x) return;\nconst float* row = table + index[blockIdx.x] * width;\n"
        "for (int c = 0; c < width; ++c) out[blockIdx.x * width + c] = row[c];",
    ),
    ("pack_words", "shortcut"): (
        "lane 0 reads 64 of the 64 columns",
        (
            "    for (int base = 0; base < 64; base += 32) {",
            "    if (lane) return;\n    for (int base = 0; base < 64; ++base) {",
        ),
        ("__ballot_sync(0xffffffffu, fires(value))", "fires(value)"),
        ("__popc(votes & ((1u << lane) - 1))", "0"),
    ),
    ("gemm_tile", "first barrier"): (
        "thread x 1, y 0 of block x 0, y 0 writes tile_a[0][1] and thread x 0, y 0 of block x 0, y 0 reads it, and no barrier",
        ("column];\n        __syncthreads();", "column];"),
    ),
    ("gemm_tile", "shortcut"): (
        "each 16 times",
        "const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;\nfloat sum = 0;\n"
        "for (int k = 0; k < depth; ++k) sum += a[row * depth + k] * b[k * columns + column];\n"
        "c[row * columns + column] = sum;",
    ),
    ("add_bias", "no end of a row"): (
        "thread x 8, y 0 of block x 1, y 0 read bias[40], out of bounds: there are 40.",
        ("row < rows && column < columns", "row < rows"),
    ),
    ("add_bias", "shortcut"): (
        "thread 0 writes 4 places of out by itself",
        "const int c = blockIdx.x * blockDim.x + threadIdx.x;\nif (blockIdx.y || threadIdx.y || c >= columns) return;\n"
        "for (int r = 0; r < rows; ++r) out[r * columns + c] = x[r * columns + c] + bias[c];",
    ),
    ("warp_dot", "shuffle of the lanes with a value"): (
        "shuffles from lane 16, which takes no part in it",
        ("float sum = 0;", "float sum = 0;\n    if (lane >= width) return;"),
    ),
    ("warp_dot", "shortcut"): (
        "let neighbouring lanes read neighbouring columns",
        "if (threadIdx.x) return;\nfloat sum = 0;\n"
        "for (int c = 0; c < width; ++c) sum += x[blockIdx.x * width + c] * w[c];\nout[blockIdx.x] = sum;",
    ),
    ("warp_dot", "shortcut by shared memory"): (
        "the sums go through memory",
        (
            "    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);\n",
            "    __shared__ float part[32];\n    part[lane] = sum;\n    __syncthreads();\n"
            "    for (int k = 1; k < 32 && lane == 0; ++k) sum += part[k];\n",
        ),
    ),
    ("gather_multiply", "shortcut"): (
        "add up in a variable, and write it once",
        "for (int c = threadIdx.x; c < width; c += 64)\n    for (int k = 0; k < count; ++k) {\n"
        "        const float term = values[blockIdx.x * count + k] * table[index[blockIdx.x * count + k] * width + c];\n"
        "        out[blockIdx.x * width + c] = k ? out[blockIdx.x * width + c] + term : term;\n    }",
    ),
    ("two_stages", "nobody waits for full"): (
        "before anybody wrote it",
        ("            wait(&full[s], 32 * (turn + 1));\n", ""),
    ),
    ("two_stages", "nobody waits for empty"): (
        "nothing puts one before the other. Who uses a stage has to wait until the others have arrived at its barrier.",
        ("            wait(&empty[s], 32 * turn);\n", ""),
    ),
    ("two_stages", "no fence"): (
        "nothing puts one before the other.",
        ("    __threadfence_block();  // what was written before comes first\n", ""),
    ),
    ("two_stages", "shortcut by one stage"): (
        "one stage alone is used",
        ("s = t % 2, turn = t / 2", "s = 0, turn = t"),
    ),
    ("two_stages", "shortcut by a barrier of all"): (
        "all threads meet at a __syncthreads",
        ("    if (threadIdx.x >= 32) out", "    __syncthreads();\n    if (threadIdx.x >= 32) out"),
    ),
    ("two_stages", "shortcut along columns"): (
        "let lanes copy along a row",
        (
            "stage[s][row][lane] = x[(first + row) * depth + 32 * t + lane]",
            "stage[s][lane][row] = x[(first + lane) * depth + 32 * t + row]",
        ),
    ),
    ("gemm_pack", "shortcut"): (
        "the lanes ask each other nothing",
        (
            "    const unsigned votes = __ballot_sync(0xffffffffu, fires);\n",
            "    __shared__ unsigned all[8][32];\n"
            "    all[ty][tx] = fires;\n    __syncthreads();\n    unsigned votes = 0;\n"
            "    for (int k = 0; k < 32; ++k) votes |= all[ty][k] << k;\n",
        ),
    ),
    ("neuron_lists", "shortcut"): (
        "entries of neuron; one for each thread is asked",
        HEAD + "for (int k = 0; i == 0 && k < n; ++k) lists[starts[neuron[k]] + cursor[neuron[k]]++] = token[k];",
    ),
    ("up_gradient", "another order"): (
        "Only the last digits are off: each addition rounds. Add in the order of the list.",
        ("k = starts[neuron]; k < starts[neuron + 1]; ++k", "k = starts[neuron + 1] - 1; k >= starts[neuron]; --k"),
    ),
    ("up_gradient", "shortcut by atomics"): (
        "sums of floats by atomics come out otherwise in each run",
        ("float sum = 0;", "dup[neuron * d_model + c] = 0;"),
        ("sum += du[k]", "atomicAdd(&dup[neuron * d_model + c], du[k]"),
        ("d_model + c];\n        dup[neuron * d_model + c] = sum;", "d_model + c]);"),
    ),
}

INT, END = "The fractions are lost: is a value kept in an `int`?", "do the threads go on to the end?"
# One slip in the answer, as a beginner makes it, and the words that name it ("": the place alone is told).
SLIPS = {
    ("map", "whole numbers"): (INT, ("2 * x[threadIdx.x]", "2 * (int)x[threadIdx.x]")),
    ("guard", "one too few"): ("It is the last: is a bound one too small?", ("i < n", "i < n - 1")),
    ("grid_stride", "six passes"): (END, ("i < n; i", "i < n && i < first + 6 * threads; i")),
    ("neighbours", "row forgotten"): ("is the row's number in the index?", ("tile[t] = x[i]", "tile[t] = x[t]")),
    ("neighbours", "reads before it writes"): (
        "before anybody wrote it: write first, then a barrier, then read.",
        (
            "    tile[t] = x[i];\n    __syncthreads();\n    float sum = tile[t];",
            "    float sum = tile[t];\n    tile[t] = x[i];\n    __syncthreads();",
        ),
    ),
    ("block_sum", "race on a shared sum"): (
        "all threads add to one place. Give each its own, and fold these.",
        ("float part[64];", "float part[64], sum; sum = 0; __syncthreads(); sum += x[blockIdx.x * 64 + threadIdx.x];"),
    ),
    ("block_sum", "row forgotten"): ("is the row's number in the index?", ("x[blockIdx.x * 64 + t]", "x[t]")),
    ("neuron_counts", "block forgotten"): (
        "number in the whole grid?",
        ("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
    ),
    ("prefix_sum", "positives only"): ("", ("sum += below", "sum += below > 0 ? below : 0")),
    ("vector_loads", "whole numbers"): ("", ("v.y *= 2", "v.y = 2 * (int)v.y")),
    ("gather_rows", "96 columns"): (END, ("c < width", "c < width && c < 96")),
    ("pack_words", "zero fires"): (
        "",
        ("!(__uint_as_float((unsigned)bits << 16) <= 0.0f)", "bits < 0x8000 || bits > 0xff80"),
    ),
    ("pack_words", "own bit counted"): (
        "Each value stands one place too far on",
        ("(1u << lane) - 1", "(2u << lane) - 1"),
    ),
    ("gemm_tile", "no first value"): ("`sum` is added to before it has a value.", ("float sum = 0", "float sum")),
    ("add_bias", "one too few"): (
        "It is the last of a row: is a bound one too small?",
        ("column < columns", "column < columns - 1"),
    ),
    ("gather_multiply", "whole numbers"): ("", ("float sum", "int sum")),
    ("two_stages", "last tile missing"): ("The last tile is missing.", ("t < depth / 32", "t < depth / 32 - 1")),
    ("neuron_lists", "last one forgotten"): ("", ("i >= n", "i >= n - 1")),
    ("up_gradient", "row of the entry"): ("", ("x[lists[k] * d_model + c]", "x[k % 9 * d_model + c]")),
}

# Right answers that are written another way.
OTHERS = {
    ("two_stages", "one lane arrives for its warp"): [
        ("arrive(&full[s]);", "__syncwarp();\n            if (lane == 0) arrive(&full[s]);"),
        ("arrive(&empty[s]);", "__syncwarp();\n            if (lane == 0) arrive(&empty[s]);"),
        ("32 * turn)", "turn)"),
        ("32 * (turn + 1)", "turn + 1"),
    ],
    ("neuron_lists", "the cursor begins at the list"): [
        HEAD
        + "if (i < n) {\n    const int j = neuron[i];\n    lists[starts[j] + atomicAdd(cursor + j, 1)] = token[i];\n}"
    ],
    ("block_sum", "by shuffles"): [
        "__shared__ float part[2];\nfloat sum = x[blockIdx.x * 64 + threadIdx.x];\n"
        "for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);\n"
        "if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;\n__syncthreads();\n"
        "if (threadIdx.x == 0) out[blockIdx.x] = part[0] + part[1];"
    ],
    ("ballot_count", "a mask of the lanes with a value"): [
        "if (threadIdx.x >= width) return;\nconst unsigned all = width < 32 ? (1u << width) - 1 : ~0u;\n"
        "const unsigned v = __ballot_sync(all, x[blockIdx.x * width + threadIdx.x] > 0);\n"
        "if (threadIdx.x == 0) counts[blockIdx.x] = __popc(v);"
    ],
    ("neuron_counts", "counted in the block first"): [
        "__shared__ int mine[64];\nmine[threadIdx.x] = 0;\n__syncthreads();\n"
        + HEAD
        + "if (i < n) atomicAdd(&mine[fired[i]], 1);\n__syncthreads();\n"
        "if (mine[threadIdx.x]) atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);"
    ],
    ("ballot_count", "read twice"): [
        (
            "lane < width && x[blockIdx.x * width + lane] > 0",
            "lane < width && x[blockIdx.x * width + lane] >= 0 && x[blockIdx.x * width + lane] != 0",
        )
    ],
    ("pack_words", "two ballots"): [
        "const int lane = threadIdx.x;\nconst unsigned short *in = gate + blockIdx.x * 64, low = in[lane], "
        "high = in[lane + 32];\nunsigned* out = packed + blockIdx.x * 8;\n"
        "const unsigned first = __ballot_sync(~0u, fires(low)), second = __ballot_sync(~0u, fires(high));\n"
        "const unsigned below = (1u << lane) - 1;\n"
        "const int a = 1 + __popc(first & below), b = 1 + __popc(first) + __popc(second & below);\n"
        "if (fires(low) && a < 8) out[a] = low << 16 | lane;\nif (fires(high) && b < 8) out[b] = high << 16 | (lane + 32);\n"
        "if (lane == 0) out[0] = __popc(first) + __popc(second);"
    ],
}


@needs_a_compiler
@pytest.mark.parametrize("name, how", OTHERS)
def test_other_ways_of_writing_it_pass(name, how, tmp_path):
    verdict = judged(name, kernel(name, *OTHERS[name, how]), tmp_path)
    assert verdict.right, verdict.said


def test_there_is_an_exercise_for_each_puzzle():
    assert list(in_the_notebook()) == list(puzzles.PUZZLES)
    assert set(puzzles.PUZZLES) <= set(exercises.CHECKS)


@needs_a_compiler
@pytest.mark.parametrize("name", puzzles.PUZZLES)
def test_the_answer_passes(name, tmp_path):
    verdict = judged(name, in_the_notebook()[name][1], tmp_path)
    assert verdict.right and verdict.said == puzzles.PUZZLES[name].right


@needs_a_compiler
@pytest.mark.parametrize("name", [name for name in puzzles.PUZZLES if name not in ("tile_counts", "row_counts")])
def test_what_is_handed_out_does_nothing_yet(name, tmp_path):
    verdict = judged(name, in_the_notebook()[name][0], tmp_path)
    (output, *_) = puzzles.PUZZLES[name].cases()[0].wanted
    assert not verdict.right and verdict.said == f"{output} is empty."


@needs_a_compiler
@pytest.mark.parametrize("name, what", WRONG)
def test_what_is_wrong_is_named(name, what, tmp_path):
    words, *edits = WRONG[name, what]
    torch.manual_seed(0)  # inputs are drawn, and with them what is told of who came how often
    verdict = judged(name, kernel(name, *edits), tmp_path)
    assert not verdict.right and words in verdict.said, verdict.said
    if what.startswith("shortcut"):
        assert verdict.said.startswith("the result is right. But")


@needs_a_compiler
@pytest.mark.parametrize("name, what", SLIPS)
def test_one_slip_is_refused_whatever_is_drawn_and_named(name, what, tmp_path):
    words, *changes = SLIPS[name, what]
    verdict = judged(name, changed(name, *changes), tmp_path)
    assert not verdict.right and not verdict.said.startswith("the result is right"), verdict.said
    if words not in verdict.said:  # a draw may let two mistakes look the same
        torch.manual_seed(0)
        assert words in judged(name, changed(name, *changes), tmp_path).said, verdict.said


@pytest.mark.parametrize("name", puzzles.PUZZLES)
def test_each_listed_slip_leaves_something_else_and_is_named(name):
    """What slips.toml says that a slip leaves is taken for that slip on one of the inputs at least."""
    torch.manual_seed(0)
    cases = puzzles.PUZZLES[name].cases()
    for said, expression in slips._slips().get(name, {}).items():
        heard = []
        for case in cases:
            for output, want in case.wanted.items():
                left = eval(expression, slips.NAMES | case.arguments | {"want": want.double()}).double()
                got = want.double().where(left.isnan(), left).to(want.dtype)
                heard.append(slips.likely(name, case, output, got).lower())
        assert any(said.lower() in each for each in heard), (said, heard)


@needs_a_compiler
def test_a_loop_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SECONDS", 1.0)
    verdict = judged("map", kernel("map", "for (volatile int i = 0; ; ) i = 0;"), tmp_path)
    assert not verdict.right and "a loop that never ends" in verdict.said


@needs_a_compiler
@pytest.mark.parametrize(
    "text, words",
    [
        ('extern "C" __global__ void map(const float* x, float* out) { out = 2 }', "does not compile"),
        ('extern "C" __global__ void mapp(const float* x, float* out) {}', "no kernel 'map'; it has mapp"),
        ('extern "C" __global__ void map(const float* x) {}', "2 were given"),
    ],
)
def test_what_cannot_be_launched_is_told(text, words, tmp_path):
    verdict = judged("map", text, tmp_path)
    assert not verdict.right and words in verdict.said


def test_without_a_compiler_the_check_says_what_to_install_and_nothing_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "none"))
    assert "apt install g++" in judged("map", in_the_notebook()["map"][1], tmp_path).said
    assert puzzles.trace_of("map", tmp_path / "map.cu") is None
    assert puzzles.figures.yours("map", tmp_path / "map.cu") is None


@needs_a_compiler
def test_the_lines_are_about_the_files_in_the_folder(tmp_path):
    (tmp_path / "map.cu").write_text(in_the_notebook()["map"][1])
    assert puzzles.standing(tmp_path).startswith("Right: 1 of 15.\nOpen: 2, 3, ")


@pytest.fixture
def on_my_gpu(my_gpu, monkeypatch):
    """A function that sets what the GPU gives; nothing is launched."""

    def gives(results):
        monkeypatch.setattr(data, "on_gpu", results)

    return gives


@needs_a_compiler
def test_what_a_gpu_says_is_part_of_the_verdict(on_my_gpu, tmp_path):
    answer = in_the_notebook()["map"][1]
    on_my_gpu(lambda text, name, cases: [case.wanted for case in cases])
    assert judged("map", answer, tmp_path).said.endswith("The My GPU gives the same.")
    on_my_gpu(lambda text, name, cases: [{"out": case.arguments["out"]} for case in cases])
    other = judged("map", answer, tmp_path)
    assert not other.right and "on the My GPU, with 32 values: your kernel writes nothing" in other.said


def test_cuda_takes_every_answer_and_all_that_is_handed_out():
    try:
        compiler.compiler()
    except StackError as missing:
        pytest.skip(str(missing))
    for name, texts in in_the_notebook().items():
        for text in texts if puzzles.PUZZLES[name].notebook != "08" else ():
            assert name.encode() in cubin(text, name, "sm_75")
    with pytest.raises(CompileError, match="identifier"):
        cubin("int a = b;", "map", "sm_75")
