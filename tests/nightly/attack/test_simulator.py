"""The kernels in the simulator under random gates; and proof that a kernel that is wrong is seen."""

import re

import pytest

from tests.nightly.attack import simulator_attack
from tests.nightly.attack.harness import attack
from twell_lab import core, simulator

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


def test_kernels_in_the_simulator(extent, report):
    counts = attack("simulator", simulator_attack.check, **extent(20_000))
    report(
        "kernels in the simulator",
        {"cases": counts.pop("checked"), "by": {k: v for k, v in counts.items() if k != "cases"}},
    )


def test_a_kernel_that_is_wrong_is_seen(tmp_path, monkeypatch):
    """Packing that keeps no NaN."""
    text = (core.kernels_dir() / "smxx_pack.cu").read_text()
    changed, many = re.subn(r"kept\(v\)", "(to_float(v) > 0.0f)", text)
    assert many
    (tmp_path / "smxx_pack.cu").write_text(changed)
    real = simulator.watching
    monkeypatch.setattr(
        simulator_attack.simulator,
        "watching",
        lambda watch, **options: real(None, replace={"smxx_pack.cu": str(tmp_path / "smxx_pack.cu")}, **options),
    )
    with pytest.raises(AssertionError, match="simulator, seed 3, case"):
        attack("simulator", simulator_attack.check, seed=3, cases=80)
