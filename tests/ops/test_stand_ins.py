"""Kernels with raw PTX in the simulator, which cannot run it, with C++ in its place: beside their references."""

import pytest

from tests.ops.rows import blocks, int8, microtiles
from tests.ops.table import check
from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator

pytestmark = pytest.mark.skipif(not simulator.available(), reason="the simulator needs a C++ compiler")
CASES = [
    pytest.param(case, id=case.name)
    for case in (*blocks.CASES, *microtiles.CASES, *int8.PRODUCTS)
    if not case.simulated and not case.large
]


@pytest.mark.parametrize("case", CASES)
def test_with_stand_ins(case):
    """Unwatched: shared memory is read through addresses of 32 bits, which the simulator does not know."""
    replace = {source.file: without_ptx(source.file) for source in case.sources}
    with simulator.watching(None, replace=replace):
        check(case, "cpu")
