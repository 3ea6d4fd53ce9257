"""All cases of the kernels' table that the simulator can run (tests/ops/table.py)."""

import pytest

from tests.ops.table import Case, cases, check
from twell_lab import simulator

pytestmark = pytest.mark.skipif(not simulator.available(), reason="the simulator needs a C++ compiler")


@pytest.mark.parametrize("case", cases(simulated=True))
def test_in_the_simulator(case: Case):
    check(case, "cpu")
