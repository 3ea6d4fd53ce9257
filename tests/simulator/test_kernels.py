"""`pack`, `down` and `gated` on drawn matrices of every geometry, run on the CPU, and watched for faults.

Outputs are poisoned: torch fills what it allocates with NaN (or the largest integer) in deterministic mode, so an
element that a kernel forgets to write is seen, and a word that it must not write. tests/ops/rows has the other cases.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.rows.drawn import gate_of
from tests.ops.table import poisoned
from tests.simulator import cases
from tests.simulator.cases import Layer
from twell_lab import simulator

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
# Each width is compiled by itself, so few of them take every path: a row that does not fill one warp's chunk, one that
# needs several warps and leaves the last chunk unfinished, and for the first versions odd ones.
WIDTHS = {torch.bfloat16: [264, 1032], torch.float32: [100]}
ANY_WIDTH = [7, 2050]
DTYPES = pytest.mark.parametrize("dtype", WIDTHS)


@pytest.fixture(autouse=True, scope="module")
def poison():
    with poisoned():
        yield


def check(layer: Layer, name: str, version: int) -> None:
    compute, error = (layer.gated, layer.gated_error) if name == "gated" else (layer.plain, layer.plain_error)
    for gate, tail in layer.sources:
        assert error(compute(version, gate, tail)) <= 1.0, (name, version, "gate" if tail[0] is None else "tail")


@DTYPES
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_pack_watched(version, dtype):
    """No fault in it; and launch really runs this version."""
    for pattern in ("some over", "odd values", "silent"):
        for columns, tile, words in ((520, 256, 32), (264, 32, 9), (24, 8, 3)):
            with simulator.watching("faults") as runs:
                cases.check_pack(gate_of(pattern, 3, columns, dtype, tile, words), tile, words, version)
            assert [run.kernel for run in runs] == [f"pack_v{version}"]


@pytest.mark.parametrize("dtype, d_model", [(dtype, widths[0]) for dtype, widths in WIDTHS.items()])
def test_down_and_gated_watched(d_model, dtype):
    """No fault in any version; and launch really runs it."""
    gate = gate_of("some over", 4, 75, dtype, 64, 17)
    gate[1], gate[2] = 1.0, -1.0
    layer = Layer.draw(gate, d_model, 64, 17, biases="ud", spoilt="ni")
    for name in ("down", "gated"):
        for version in cases.versions(name, dtype, d_model):
            with simulator.watching("faults") as runs:
                check(layer, name, version)
            assert [run.kernel for run in runs] == [f"{name}_v{version}"] * 2


@pytest.mark.parametrize("vectors", [False, True])
@settings(max_examples=25)
@given(data=st.data())
def test_pack_of_any_geometry(vectors, data):
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    gate, tile, words = data.draw(cases.gates(dtype, cases.PATTERNS, vectors=vectors))
    for version in (3, 4) if vectors else (1, 2):
        cases.check_pack(gate, tile, words, version)


@pytest.mark.parametrize("name", ["down", "gated"])
@settings(max_examples=12)
@given(data=st.data())
def test_down_and_gated_keep_the_error_promise(name, data):
    dtype = data.draw(st.sampled_from(list(WIDTHS)))
    d_model = data.draw(st.sampled_from([*WIDTHS[dtype], *ANY_WIDTH]))
    layer = data.draw(cases.layers(dtype, d_model))
    for version in cases.versions(name, dtype, d_model):
        check(layer, name, version)


@settings(max_examples=6)
@given(data=st.data())
def test_a_gate_that_is_not_finite(data):
    """NaN and infinities spread over their rows as in the dense layer; the other rows keep the promise."""
    gate, tile, words = data.draw(cases.gates(torch.bfloat16, ["odd values", "any bits"], most_columns=300))
    layer = Layer.draw(gate, 264, tile, words)
    for version in cases.versions("down", torch.bfloat16, 264):
        check(layer, "down", version)


def test_an_fp16_overflow_in_a_silent_neuron_does_no_harm():
    gate = gate_of("sparse", 4, 300, torch.float16)
    gate[:, 17] = -1
    layer = Layer.draw(gate, 1032, 256, 32)
    layer.up[17] = 6e4  # x . up[17] exceeds fp16; the neuron is silent
    layer.x.abs_()
    for version in (1, 2, 3, 4):
        y, calm = layer.gated(version, *layer.sources[0]), layer.up.clone()
        layer.up[17] = 0
        assert y.isfinite().all() and torch.equal(y, layer.gated(version, *layer.sources[0]))
        layer.up[17] = calm[17]
