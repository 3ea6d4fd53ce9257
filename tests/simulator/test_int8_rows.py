"""The kernel of INT8 rows, run on the CPU: every version beside torch's operations on the same rounded values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator import cases
from tests.simulator.int8_cases import Int8Layer
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.cuda.launch import run
from twell_lab.ops.pack import pack
from twell_lab.ops.int8_rows import gated_int8

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
PATTERNS = ["sparse", "dense", "silent", "all", "full tiles", "one over", "some rows over"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(
    pattern=st.sampled_from(PATTERNS),
    geometry=st.sampled_from(cases.GEOMETRIES),
    rows=st.integers(1, 4),
    columns=st.integers(1, 300),
    d_model=st.sampled_from([77, 264]),
    version=st.sampled_from([None, 1, 2, 3, 4]),
    biases=st.booleans(),
    spoilt=st.booleans(),
    plain=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_every_version(dtype, pattern, geometry, rows, columns, d_model, version, biases, spoilt, plain, seed):
    gate = cases.gate_of(pattern, rows, columns, dtype, *geometry, seed)
    Int8Layer.draw(gate, d_model, biases, spoilt, seed).check(*geometry, version, plain)


def test_values_of_either_sign_and_rows_over_several_warps():
    gate = cases.gate_of("some rows over", 3, 75, torch.bfloat16, 16, 5)
    gate = torch.where(gate.abs() < 0.3, 0.0, gate)
    for version in (1, 3):
        Int8Layer.draw(gate, 264).check(16, 5, version, signed=True)
    for version in (2, 3, 4):
        Int8Layer.draw(gate, 1032).check(16, 5, version)


def test_without_rows_nothing_is_launched():
    case = Int8Layer.draw(torch.zeros(1, 8), 16)
    packed = run(pack, case.gate[:0], 8, 3)
    y = gated_int8(case.x[:0], packed, case.gate[:0], case.up, case.down, None, None, 8)
    assert y.shape == (0, 16)


def test_what_does_not_fit():
    case = Int8Layer.draw(torch.ones(2, 8), 16)
    packed = run(pack, case.gate, 8, 3)
    with pytest.raises(InputError, match="version is 5; 1 to 4 are accepted"):
        gated_int8(case.x, packed, case.gate, case.up, case.down, None, None, 8, 5)
    for wrong in (
        (case.down.values.float(), case.down.scale),
        (case.down.values[:7], case.down.scale),
        (case.down.values, case.down.scale.double()),
        (case.down.values, case.down.scale[:7]),
    ):
        with pytest.raises(InputError, match=r"torch.int8 \[8, 16\] with torch.float32 \[8\] is accepted"):
            gated_int8(case.x, packed, case.gate, case.up, wrong, None, None, 8)
