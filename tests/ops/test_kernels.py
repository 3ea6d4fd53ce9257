"""Every kernel that the simulator can run, beside its reference (tests/ops/table.py); tests/nightly/test_simulated.py
has the cases left out here."""

import pytest

from tests.ops.table import Case, cases, check
from twell_lab import simulator

pytestmark = pytest.mark.skipif(not simulator.available(), reason="the simulator needs a C++ compiler")


@pytest.mark.parametrize("case", cases(simulated=True, usual=True))
def test_in_the_simulator(case: Case):
    check(case, "cpu")
