"""`pack`, `down` and `gated` on drawn matrices of every geometry, run on the CPU, and watched for faults: cases as those
of tests/ops/rows, which has the others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.rows import gated, pack
from tests.ops.rows.drawn import BF16, FP16, FP32
from tests.ops.table import Case, check
from twell_lab import simulator
from twell_lab.cuda.launch import run
from twell_lab.ops.down import specialisation

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
# Each width is compiled by itself, so few of them take every path: a row that does not fill one warp's chunk, one that
# needs several warps and leaves the last chunk unfinished, and for the first versions odd ones.
WIDTHS = {BF16: [264, 1032], FP32: [100]}
ANY_WIDTH = [7, 2050]
DTYPES = pytest.mark.parametrize("dtype", WIDTHS)
NEWEST = {"gated": 4, "down": 3}
FINITE = ["sparse", "dense", "silent", "all", "full tiles", "one over", "some over", "denormal"]
# (tile, words): from two words to a slot for every column, and columns that no vector divides.
GEOMETRIES = [(256, 32), (64, 17), (32, 33), (100, 5), (8, 3), (7, 2), (300, 40)]


def versions(name: str, dtype: torch.dtype, d_model: int) -> range:
    """The versions of the down or gated kernel that take this width."""
    return range(1, NEWEST[name] + 1) if specialisation(dtype, d_model) else range(1, 2)


@st.composite
def gates(draw, dtype: torch.dtype, patterns: list[str], most_columns: int = 700, vectors: bool = False):
    """(pattern, rows, columns, tile, words, seed) of a gate. vectors: only widths that the kernels with 16-byte loads
    take."""
    vector = 16 // dtype.itemsize
    geometries = [(tile, words) for tile, words in GEOMETRIES if not vectors or tile % vector == 0]
    tile, words = draw(st.sampled_from(geometries))
    # Around whole numbers of tiles, and anywhere.
    near = st.builds(lambda n, off: max(1, n * tile + off), st.integers(1, most_columns // tile), st.integers(-1, 1))
    columns = draw(st.one_of(near, st.integers(1, most_columns)))
    columns = -(-columns // vector) * vector if vectors else columns
    return draw(st.sampled_from(patterns)), draw(st.integers(1, 5)), columns, tile, words, draw(st.integers(0, 99))


def check_watched(case: Case, kernel: str) -> None:
    """No fault in it, and what was asked for is what runs."""
    with simulator.watching("faults") as runs:
        run(case.operation, *case.draw())
    assert [run.kernel for run in runs] == [kernel]
    check(case, "cpu", watch="faults")


@DTYPES
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_pack_watched(version, dtype):
    for pattern in ("some over", "odd values", "silent"):
        for shape in ((3, 520, 256, 32), (3, 264, 32, 9), (3, 24, 8, 3)):
            check_watched(pack.case(pattern, dtype, version, *shape), f"pack_v{version}")


@pytest.mark.parametrize("name", NEWEST)
@pytest.mark.parametrize("dtype, d_model", [(dtype, widths[0]) for dtype, widths in WIDTHS.items()])
def test_down_and_gated_watched(d_model, dtype, name):
    for version in versions(name, dtype, d_model):
        for pattern, tail in (("some over", False), ("some over", True), ("all", False), ("silent", True)):
            case = gated.case(name, pattern, version, dtype, (5, d_model, 75), tail, 64, 17, how="spoilt")
            check_watched(case, f"{name}_v{version}")


@pytest.mark.parametrize("vectors", [False, True])
@settings(max_examples=25)
@given(data=st.data())
def test_pack_of_any_geometry(vectors, data):
    dtype = data.draw(st.sampled_from([BF16, FP16, FP32]))
    pattern, *shape, seed = data.draw(gates(dtype, [*FINITE, "odd values", "any bits"], vectors=vectors))
    for version in (3, 4) if vectors else (1, 2):
        check(pack.case(pattern, dtype, version, *shape, seed=seed), "cpu")


@pytest.mark.parametrize("name", NEWEST)
@settings(max_examples=12)
@given(data=st.data())
def test_down_and_gated_keep_the_error_promise(name, data):
    dtype = data.draw(st.sampled_from(list(WIDTHS)))
    d_model = data.draw(st.sampled_from([*WIDTHS[dtype], *ANY_WIDTH]))
    pattern, rows, columns, *geometry, seed = data.draw(gates(dtype, FINITE, most_columns=400))
    how = data.draw(st.fixed_dictionaries({"how": st.sampled_from(["", "spoilt"]), "biases": st.sampled_from(["", "u", "d", "ud"])}))  # fmt: skip
    for version in versions(name, dtype, d_model):
        for tail in (False, True):
            shape = rows, d_model, columns
            check(gated.case(name, pattern, version, dtype, shape, tail, *geometry, **how, seed=seed), "cpu")


@settings(max_examples=6)
@given(data=st.data())
def test_a_gate_that_is_not_finite(data):
    """NaN and infinities spread over their rows as in the dense layer; the other rows keep the promise."""
    pattern, rows, columns, *geometry, seed = data.draw(gates(BF16, ["odd values", "any bits"], most_columns=300))
    for version in versions("down", BF16, 264):
        for tail in (False, True):
            shape = rows, 264, columns
            check(gated.case("down", pattern, version, BF16, shape, tail, *geometry, biases="", seed=seed), "cpu")


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_an_fp16_overflow_in_a_silent_neuron_does_no_harm(version):
    case = gated.case("gated", "sparse", version, FP16, (4, 1032, 300))
    x, gate, packed, overflow, up, *rest = case.draw()
    neuron = (gate <= 0).all(0).nonzero()[17, 0]
    found = []
    for value in (6e4, 0):  # x . up[neuron] exceeds fp16
        up[neuron] = value
        found.append(run(case.operation, x.abs(), gate, packed, overflow, up, *rest))
    assert found[0].isfinite().all() and torch.equal(*found)
