"""One small case of each kernel, version and size of values: what runs under compute-sanitizer.

test_kernels.py says whether the results are right: that takes products by cuBLAS, in which racecheck reports hazards."""

import pytest

from tests.ops.table import Case, cases, run_twice

pytestmark = pytest.mark.gpu


def reduced() -> list:
    """The first case of each name, before its colon, and size of values; one that is small where there is one."""
    chosen = {}
    for parameter in sorted(cases(), key=lambda parameter: parameter.values[0].large):
        name, _, rest = parameter.id.partition(":")
        chosen.setdefault((name, "float32" in rest), parameter)
    return list(chosen.values())


@pytest.mark.parametrize("case", reduced())
def test_one_of_each(case: Case):
    run_twice(case, "cuda")
