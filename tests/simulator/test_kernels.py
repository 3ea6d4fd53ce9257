"""`pack`, `down` and `gated` on drawn matrices of every geometry, run on the CPU, and watched for faults.

Outputs are poisoned: torch fills what it allocates with NaN (or the largest integer) in deterministic mode, so an
element that a kernel forgets to write is seen, and a word that it must not write.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator import cases
from tests.simulator.cases import Layer
from twell_lab import simulator
from twell_lab.cuda.launch import run
from twell_lab.ops import reference
from twell_lab.ops.down import down
from twell_lab.ops.gated import gated
from twell_lab.ops.pack import pack

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Each width is compiled by itself, so few of them take every path: a row that does not fill one warp's chunk, one that
# needs several warps and leaves the last chunk unfinished, and for the v1 kernels odd ones and more than a slab.
WIDTHS = {torch.bfloat16: [264, 1032], torch.float16: [8, 1032], torch.float32: [100, 516]}
ANY_WIDTH = [1, 7, 333, 2050]


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    """Fresh memory is poisoned. And every kernel has run watched before any runs unwatched, where a write out of
    bounds could end the process.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    for version in (1, 2, 3, 4):
        watched_pack(version, torch.bfloat16)
    watched_down_and_gated(264, torch.bfloat16)
    yield
    torch.use_deterministic_algorithms(False)


# ---- pack


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=80)
@given(data=st.data())
def test_pack_of_any_width(dtype, data):
    gate, tile, words = data.draw(cases.gates(dtype, cases.PATTERNS))
    for version in (1, 2):
        cases.check_pack(gate, tile, words, version)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=80)
@given(data=st.data())
def test_pack_by_vectors(dtype, data):
    gate, tile, words = data.draw(cases.gates(dtype, cases.PATTERNS, vectors=True))
    for version in (3, 4):
        cases.check_pack(gate, tile, words, version)


def watched_pack(version, dtype):
    for pattern in ("some rows over", "odd values", "one over", "silent"):
        for columns, tile, words in ((520, 256, 32), (264, 32, 9), (24, 8, 3)):
            gate = cases.gate_of(pattern, 3, columns, dtype, tile, words)
            with simulator.watching("faults") as runs:
                cases.check_pack(gate, tile, words, version)
            assert [run.kernel for run in runs] == [f"pack_v{version}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_pack_watched(version, dtype):
    """No fault in it; and launch really runs this version."""
    watched_pack(version, dtype)


def test_pack_of_many_tiles():
    """More blocks than cores, and a last block that is not full."""
    gate = cases.gate_of("sparse", 67, 5632, torch.bfloat16, 256, 32)
    for version in (1, 2, 3, 4):
        cases.check_pack(gate, 256, 32, version)


# ---- down and gated


def check(layer: Layer, name: str, version: int) -> None:
    compute, error = (layer.gated, layer.gated_error) if name == "gated" else (layer.plain, layer.plain_error)
    for gate, tail in layer.sources:
        y = compute(version, gate, tail)
        assert error(y) <= 1.0, (name, version, "gate" if tail[0] is None else "tail")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["down", "gated"])
@settings(max_examples=25)
@given(data=st.data())
def test_down_and_gated_keep_the_error_promise(name, dtype, data):
    d_model = data.draw(st.sampled_from(WIDTHS[dtype]))
    layer = data.draw(cases.layers(dtype, d_model))
    for version in cases.versions(name, dtype, d_model):
        check(layer, name, version)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["down", "gated"])
@settings(max_examples=15)
@given(data=st.data())
def test_the_first_versions_take_any_width(name, dtype, data):
    check(data.draw(cases.layers(dtype, data.draw(st.sampled_from(ANY_WIDTH)))), name, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["odd values", "any bits"])
@settings(max_examples=10)
@given(data=st.data())
def test_a_gate_that_is_not_finite(pattern, dtype, data):
    """NaN and infinities spread over their rows as in the dense layer; the other rows keep the promise."""
    d_model = WIDTHS[dtype][0]
    gate, tile, words = data.draw(cases.gates(dtype, [pattern], most_columns=300))
    layer = Layer.draw(gate, d_model, tile, words)
    for version in cases.versions("down", dtype, d_model):
        check(layer, "down", version)


def watched_down_and_gated(d_model, dtype):
    gate = cases.gate_of("some rows over", 4, 75, dtype, 64, 17)
    gate[1], gate[2] = 1.0, -1.0
    layer = Layer.draw(gate, d_model, 64, 17, biases="ud", spoilt="ni")
    for name in ("down", "gated"):
        for version in cases.versions(name, dtype, d_model):
            with simulator.watching("faults") as runs:
                check(layer, name, version)
            assert [run.kernel for run in runs] == [f"{name}_v{version}"] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("narrow", [True, False])
def test_down_and_gated_watched(narrow, dtype):
    """No fault in any version; and launch really runs it."""
    watched_down_and_gated(WIDTHS[dtype][0 if narrow else 1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [True, False])
def test_rows_that_are_not_finite_follow_the_dense_layer(wide, dtype):
    d_model = WIDTHS[dtype][wide]
    gate = cases.gate_of("dense", 8, 300, dtype, 256, 32)
    gate[5] = gate[6] = 1.0  # every neuron fires: there are no zeros to multiply infinity by
    layer = Layer.draw(gate, d_model, 256, 32)
    layer.x[1, 3], layer.x[4, 0], layer.x[5, -1], layer.x[6, 1] = torch.nan, torch.inf, -torch.inf, torch.nan
    dense = torch.relu(layer.gate) * (layer.x @ layer.up.t()) @ layer.down.t()
    for version in cases.versions("gated", dtype, d_model):
        for gate, tail in layer.sources:
            y = layer.gated(version, gate, tail)
            assert torch.equal(y.isnan(), dense.isnan()) and torch.equal(y.isinf(), dense.isinf())
            assert y[[1, 4, 6]].isnan().all() and y[[0, 2, 3, 7]].isfinite().all()
            check(layer, "gated", version)


def test_an_fp16_overflow_in_a_silent_neuron_does_no_harm():
    gate = cases.gate_of("sparse", 4, 300, torch.float16, 256, 32)
    gate[:, 17] = -1
    layer = Layer.draw(gate, 1032, 256, 32)
    layer.up[17] = 6e4  # x . up[17] exceeds fp16; the neuron is silent
    layer.x.abs_()
    wide = [t.double() for t in (layer.x, gate, layer.up, layer.down)]
    exact = reference.gated(*wide)
    for version in (1, 2, 3, 4):
        y = layer.gated(version, *layer.sources[0])
        assert y.isfinite().all() and (y.double() - exact).norm() / exact.norm() < 1e-3


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is no multiple of 16."""
    moved = torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)
    assert moved.data_ptr() % 16 and moved.is_contiguous()
    return moved


def test_unaligned_tensors_take_the_slower_kernels():
    layer = Layer.draw(cases.gate_of("sparse", 3, 520, torch.bfloat16, 256, 32), 264, 256, 32)
    with simulator.watching("faults") as runs:
        packed = run(pack, shifted(layer.gate), 256, 32)
        y = run(
            gated,
            shifted(layer.x),
            packed,
            shifted(layer.gate),
            cases.NO_TAIL,
            shifted(layer.up),
            shifted(layer.down_t),
            None,
            None,
            256,
        )
    assert [run.kernel for run in runs] == ["pack_v2", "gated_v1"]
    assert layer.gated_error(y) <= 1.0


def test_no_rows_launch_nothing():
    with simulator.watching("faults") as runs:
        empty = torch.empty(0, 520, dtype=torch.bfloat16)
        assert run(pack, empty, 256, 32).shape == (0, 3, 32)
        assert run(
            down,
            torch.empty(0, 3, 32, dtype=torch.int32),
            empty,
            cases.NO_TAIL,
            empty.new_empty(520, 8),
            None,
            520,
            256,
        ).shape == (0, 8)
    assert runs == []
