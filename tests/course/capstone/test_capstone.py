"""The capstone: its judge takes the answer and the library's kernels, and names mistakes, faults and shortcuts."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.course.capstone.notebook_kernel import changed, folded, in_the_notebook
from tests.course.handed_out import edited, handed_out, needs_a_compiler, with_body
from twell_lab import records, simulator
from twell_lab.core import CompileError, InputError, StackError
from twell_lab.course import exercises
from twell_lab.course.capstone import cases, data, gpu
from twell_lab.course.capstone import data as capstone
from twell_lab.cuda.launch import run
from twell_lab.ops.down import down


@pytest.fixture
def judged(tmp_path):
    """A function that judges a source."""

    def judge(text: str) -> capstone.Judged:
        (tmp_path / "down.cu").write_text(text)
        return capstone.judge(tmp_path / "down.cu")

    return judge


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """The path of the folded answer that earns silver."""
    file = tmp_path_factory.mktemp("answer") / "down.cu"
    file.write_text(in_the_notebook()[1])
    return file


@pytest.fixture(scope="module")
def silver(answer):
    """What is said of the folded answer."""
    return capstone.judge(answer)


# Right, and reads everything again for each of its columns: `before` and body of a kernel.
SCALAR = """
    const int row = blockIdx.x, tiles = tiles_of(columns, tile);
    for (int c = threadIdx.x; c < d_model; c += THREADS) {
        float sum = 0;
        for (int t = 0; t < tiles; ++t) {
            const word_t* word = packed + ((long long)row * tiles + t) * words;
            const int first = t * tile;
            if ((int)word[0] < words) {
                for (int i = 1; i <= (int)word[0]; ++i)
                    sum += to_float(word_value(word[i])) * to_float(down_t[(long long)(first + word_column(word[i])) * d_model + c]);
            } else {
                for (int i = first; i < first + tile_width(columns, tile, t); ++i) {
                    const value_t g = gate[(long long)row * columns + i];
                    if (fires(g)) sum += to_float(g) * to_float(down_t[(long long)i * d_model + c]);
                }
            }
        }
        y[(long long)row * d_model + c] = from_float(sum);
    }
"""
# The shortcut: unpack the row, then the dense product, `use` saying what of a row of down_t is added.
DENSE = """
    __shared__ float h[8192];
    const int row = blockIdx.x, tiles = tiles_of(columns, tile);
    for (int c = threadIdx.x; c < columns; c += THREADS) h[c] = 0;
    __syncthreads();
    for (int t = threadIdx.x; t < tiles; t += THREADS) {
        const word_t* word = packed + ((long long)row * tiles + t) * words;
        if ((int)word[0] < words)
            for (int i = 1; i <= (int)word[0]; ++i) h[t * tile + word_column(word[i])] = to_float(word_value(word[i]));
        else
            for (int i = 0; i < tile_width(columns, tile, t); ++i) {
                const value_t g = gate[(long long)row * columns + t * tile + i];
                if (fires(g)) h[t * tile + i] = to_float(g);
            }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < d_model; c += THREADS) {
        float sum = 0;
        for (int k = 0; k < columns; ++k) {
            const float weight = to_float(down_t[(long long)k * d_model + c]);
            USE
        }
        y[(long long)row * d_model + c] = from_float(sum);
    }
"""
COUNT = "if (count < words) {"
WRONG = {
    "handed out": ("with 600 columns, the last tile 88 wide, and d_model 264: your kernel", ""),
    "column within the tile": (
        "column within a tile is taken as the column of the matrix",
        ("down_t + (long long)t * tile * d_model + c", "down_t + c"),
    ),
    "count as a value": (
        "word 0, the count, read in its place",
        ("int i = 1; i <= count", "int i = 0; i < count"),
    ),
    "words past the count": ("all words of a tile are read", ("i <= count", "i < words")),
    "the words alone": (
        "keeps 31 of them in its words; all of them stand in the gate",
        (COUNT, "if (true) {"),
        ("i <= count", "i <= min(count, words - 1)"),
    ),
    "overflow left out": ("tiles that overflow were left out", ("if (fires(g[i]))", "if (false)")),
    "a barrier for some": (
        "the result is right. But thread 0 comes to 1 barriers and thread",
        "if (threadIdx.x % WARP == 0) __syncthreads();\n" + SCALAR,
    ),
    "NaN lost": (
        "with NaN, infinity, and zeros of both signs: y[3][0] should be nan",
        ("if (fires(g[i]))", "if (to_float(g[i]) > 0)"),
    ),
    "zeros kept": (
        "What was used may be a silent neuron's row of down_t",
        ("if (fires(g[i]))", "if (!(to_float(g[i]) < 0))"),
    ),
    "wrong row": ("found a GlobalRace", ("(y + (long long)row * d_model", "(y + (long long)0 * d_model")),
    "never ends": ("found a TooLong", ("t < tiles; ++t", "t < tiles;")),
    "dense, and hides it": (
        "too many sectors, of neurons that are silent",
        DENSE.replace("USE", "if (h[k] != 0) sum += h[k] * weight;"),
    ),
    "the library's walk": ("twell.cuh alone is accepted", ('#include "twell.cuh"', '#include "row_walk.cuh"')),
    "another name": ("has no kernel 'down'", ("\ndown(const", "\nup(const")),
    "no THREADS": ("defines no THREADS", ("#define THREADS 256", "")),
}


@needs_a_compiler
def test_the_example_beside_the_task_copies_eight_values(tmp_path):
    (example,) = folded("cpp")
    file = tmp_path / "example.cu"
    arguments = "const value_t* down_t, value_t* y, int i"
    file.write_text(f'#include "twell.cuh"\nextern "C" __global__ void example({arguments}) {{\n{example}}}\n')
    values, y = torch.randn(24).bfloat16(), torch.zeros(24, dtype=torch.bfloat16)
    simulator.compile(file, {"VALUE_BF16": True}).launch("example", 1, 1, (values, y, 8))
    assert torch.equal(y[8:16], values[8:16]) and not y[:8].any() and not y[16:].any()


@needs_a_compiler
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name, judged, monkeypatch):
    if name == "never ends":  # the others may take long on a busy machine
        monkeypatch.setattr(data, "SECONDS", 1.5)
    words, *edits = WRONG[name]
    found = judged(with_body(in_the_notebook()[0], edits[0]) if isinstance(edits[0], str) else changed(*edits))
    assert not found.right and words in found.said and found.counts is None and capstone.medal(found) is None


# (step, what is wrong) -> (a change to its folded answer, words of what is said).
WRONG_STEPS = {
    ("one_tile", "no guard"): ("    if (c >= d_model) return;\n", "", "the simulator found a"),
    ("one_tile", "silent rows"): (
        "    if (c >= d_model) return;\n",
        "    if (c >= d_model || !word[0]) return;\n",
        "never written",
    ),
    ("all_tiles", "words of the first tile"): ("* tiles + t) * words", "* tiles) * words", "OutOfBounds"),
    ("wide_rows", "one pass"): (
        "c < d_model; c += THREADS",
        "c < THREADS && c < d_model; c += THREADS",
        "was never written",
    ),
    ("full_tiles", "31 values are too many"): (
        "(int)word[0] < words",
        "(int)word[0] < words - 1",
        "What was used may be",
    ),
    ("full_tiles", "32 values fit"): (
        "(int)word[0] < words",
        "(int)word[0] <= words",
        "A tile of 32 values overflows, too",
    ),
    ("full_tiles", "past the last tile"): (
        "i < tile_width(columns, tile, t)",
        "i < tile",
        "the last is 100 columns wide",
    ),
}


def step_answers() -> dict[str, str]:
    return {name: handed_out(kernels=True)[name][1] for name in cases.STEPS}


@needs_a_compiler
@pytest.mark.parametrize("name, what", WRONG_STEPS)
def test_what_is_wrong_in_a_step_is_named(name, what, tmp_path):
    old, new, words = WRONG_STEPS[name, what]
    (tmp_path / "step.cu").write_text(edited(step_answers()[name], (old, new)))
    found = capstone.judge(tmp_path / "step.cu", name)
    assert not found.right and words in found.said, found.said


@needs_a_compiler
def test_each_step_passes_those_before_it_and_not_the_next_and_the_last_is_bronze(tmp_path):
    answers, names = step_answers(), [*cases.STEPS]
    for at, name in enumerate(names):
        for other, step in enumerate([*names, "down"]):
            if other <= at + 1:
                (tmp_path / "step.cu").write_text(answers[name].replace(f"\n{name}(", f"\n{step}("))
                found = capstone.judge(tmp_path / "step.cu", step)
                assert found.right == (other <= at or step == "down"), (name, step, found.said)
    assert capstone.medal(found) == "bronze"


@needs_a_compiler
def test_the_answer_earns_silver_and_its_check_says_so(answer, silver, capsys):
    assert silver.right and capstone.medal(silver) == "predicted gold"  # nothing was timed
    assert silver.sectors <= 1.5 * silver.floor == 1.5 * capstone.floor()
    exercises.check("down", str(answer))
    assert capsys.readouterr().out.startswith("Right: predicted gold. Right on every input")


@needs_a_compiler
@pytest.mark.parametrize("threads", [32, 256])
def test_the_answer_that_is_meant_for_gold_is_right_and_reads_little_more_than_the_floor(judged, threads):
    text = in_the_notebook()[2]
    assert text.count("THREADS 256") == 1
    found = judged(text.replace("THREADS 256", f"THREADS {threads}"))
    assert found.right and capstone.medal(found) == "predicted gold"  # gold takes a GPU
    assert threads < 256 or f"{found.sectors / found.floor:.2f}" == "1.02"  # as the notebook says


@needs_a_compiler
def test_the_contract_is_that_of_the_librarys_kernels():
    for of in cases.small(64):
        for version in gpu.VERSIONS if of.down_t.shape[1] == 40 else (1,):  # the others are compiled for each width
            y = run(down, of.packed, of.gate, (None, None, None), of.down_t, None, of.columns, 256, version)
            assert cases.wrong(of, y) is None, (version, of.said)


def test_what_is_right_is_taken_and_one_value_that_is_off_is_found():
    for of in cases.small(64):
        exact, size = cases.sums(of)
        y = exact.to(of.down_t.dtype)
        assert cases.wrong(of, y) is None, of.said
        row, column = int(torch.randint(len(y), ())), int(torch.randint(y.shape[1], ()))
        want, terms = float(exact[row, column]), float(size[row, column])
        y[row, column] = want + math.copysign(0.05 * terms + 1e-3, want) if math.isfinite(want) else 1.0
        assert f"y[{row}][{column}] should be" in cases.wrong(of, y), of.said
    with_gap = cases.small(64)[0]
    y = cases.sums(with_gap)[0].to(torch.bfloat16)
    y[1, 3] = with_gap.y()[0, 0]
    assert "y[1][3] was never written" in cases.wrong(with_gap, y)


def test_the_counted_launch_is_the_same_everywhere_and_so_is_its_floor():
    of = cases.counted()
    assert of.kept.sum(1).tolist() == [cases.NNZ] * cases.COUNTED
    rows = cases.COUNTED * cases.NNZ * cases.D_MODEL * 2 // 32
    assert rows < cases.floor_sectors(of) == capstone.floor() < rows + 4 * 22 * 4
    assert torch.equal(of.packed, cases.counted().packed)


def test_a_floor_with_a_tile_that_overflows():
    gate = torch.full((1, 300), -1.0)
    gate[0, :40] = 1.0
    of = cases.case("made up", gate.bfloat16(), torch.ones(300, 16).bfloat16())
    # A count and the gate of 256 columns; one sector of words of the second tile; 40 rows of 32 bytes.
    assert cases.floor_sectors(of) == (1 + 16) + 1 + 40


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * (data.LARGEST + 1)])
def test_what_is_no_source_is_refused(tmp_path, content):
    file = tmp_path / "down.cu"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match="down.cu.*accepted"):
        capstone.judge(file)
    with pytest.raises(InputError, match="no file.*accepted"):
        capstone.judge(tmp_path)


def times(**ms) -> list[dict]:
    shared = {"kind": gpu.KIND, "device": "NVIDIA H100 80GB HBM3", "tokens": cases.TIMED, "spread": 0.001}
    return [{**shared, "path": path, "ms": each} for path, each in ms.items()]


FAST, SLOW = (times(yours=yours, down_v1=0.8, down_v2=0.22, down_v3=0.5) for yours in (0.27, 0.28))


@needs_a_compiler
def test_medals(silver):
    wasteful = replace(silver, floor=silver.floor // 2)
    assert capstone.medal(replace(silver, right=False)) is None and capstone.medal(wasteful, FAST) == "bronze"
    assert capstone.medal(silver, FAST) == "gold" and capstone.medal(silver, SLOW) == "silver"
    assert capstone.medal(silver, []) == "predicted gold" and "no measurement" in capstone.next_step(
        "predicted gold", silver
    )
    slow = replace(silver, counts=capstone.library_counts()["down_v1"])  # few sectors, in many loads
    assert capstone.medal(slow) == "silver" and "predicted gold is for" in capstone.next_step("silver", slow)


@needs_a_compiler
def test_a_prediction_counts_each_row_for_each_block_and_memory_once(silver):
    found, slower = (capstone.predicted(silver.counts, name) for name in ("H100 SXM", "T4"))
    assert found.l2_bytes > 16384 * 29 * 4096 > 1e9 > found.memory_bytes > 2 * 16384 * 2048
    rates = capstone.gpu_rates("H100 SXM")
    least = capstone.least_us(found.l2_bytes, found.memory_bytes, rates.l2, rates.bandwidth)
    assert found.us == pytest.approx(least) and found.limit == "L2 cache"
    assert slower.us > 5 * found.us
    assert slower.memory_bytes > 4 * found.memory_bytes  # its L2 keeps few of the rows of down_t


@needs_a_compiler
def test_predicted_stands_beside_measured_with_times_and_without(silver):
    mine, here = capstone.compared(silver, FAST), capstone.compared(capstone.Judged(False, "made up"))
    assert [row["version"] for row in mine] == ["yours", "down_v1", "down_v2", "down_v3"]
    assert mine[0]["measured_us"] == pytest.approx(270) and "yours, now" in mine[0]["where"]
    assert [row["version"] for row in here] == ["down_v1", "down_v2", "down_v3"]
    assert all("recorded on NVIDIA H100" in row["where"] for row in here)
    assert all(row["predicted_us"] > 0 < row["sectors"] for row in mine + here)


@pytest.mark.parametrize(
    "arch, dtype", [("sm_75", torch.float16), ("sm_80", torch.bfloat16), ("sm_90", torch.bfloat16)]
)
def test_the_answers_compile_for_every_gpu(arch, dtype):
    pytest.importorskip("cupy")
    for text in (*in_the_notebook()[1:], *step_answers().values()):
        assert gpu.cubin(text, "down", arch, gpu.headers(dtype))[:4] == b"\x7fELF"
    with pytest.raises(CompileError, match="down.cu"):
        gpu.cubin("int x = ;", "down", arch, gpu.headers(dtype))


@needs_a_compiler
def test_a_submission_is_judged_timed_and_recorded(answer, silver, my_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "judge", lambda file: silver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    *_, record = capstone.submit(answer)
    (row,) = record.rows
    assert row["sectors_read"] == silver.sectors and "kind" not in row
    assert str(answer.parent) not in json.dumps(row)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(data.clocks, "dtype_for", lambda device: torch.bfloat16)
    monkeypatch.setattr(gpu, "Mine", lambda text, threads, dtype: text)
    monkeypatch.setattr(gpu, "wrong", lambda mine: None)
    monkeypatch.setattr(gpu, "timed", lambda mine: FAST)
    said, _, record = capstone.submit(answer)
    again = records.load(record.save(tmp_path))
    assert said.startswith("gold: ")
    assert again.rows[1:] == FAST and again.notes["medal"] == "gold" and again.notes["source"] == answer.read_text()
    monkeypatch.setattr(gpu, "wrong", lambda mine: "with NaN: y[0][0]")
    said, on_gpu, record = capstone.submit(answer)
    assert "with NaN: y[0][0]" in on_gpu and record.rows[1:] == [] and said.startswith("predicted gold: ")
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "none"))
    with pytest.raises(StackError, match="g\\+\\+"):
        capstone.submit(answer)
