"""What every room's tests share: hypothesis profiles, torch's threads, and what needs a GPU.

tests/gpu also runs on machines that have torch, CuPy and pytest alone, so hypothesis is optional here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass
else:
    # No deadlines: a shared machine's pauses are not the code's. CI repeats the same examples every time;
    # a developer's runs look for new ones.
    settings.register_profile("dev", deadline=None, max_examples=50)
    settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, database=None)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")

# More threads than this change timings from one machine to the next, and no test needs them.
torch.set_num_threads(min(torch.get_num_threads(), 4))

_GPU_TESTS = Path(__file__).parent / "gpu"
_NIGHTLY = Path(__file__).parent / "nightly"


def pytest_addoption(parser):
    """Which cases the fuzzers of tests/nightly/attack run."""
    group = parser.getgroup("nightly", "what tests/nightly does")
    group.addoption("--attack-cases", type=int, metavar="N", help="so many cases of each fuzzer")
    group.addoption("--attack-seconds", type=float, metavar="S", help="layers for so long, instead of so many")
    group.addoption("--attack-seed", type=int, default=0, metavar="N", help="other cases [0]")
    group.addoption("--attack-case", type=int, metavar="N", help="one case alone, as a failure names it")
    group.addoption("--attack-report", metavar="FILE", help="write what each fuzzer did here, as JSON")


def pytest_ignore_collect(collection_path, config):
    """What is in tests/nightly runs where it is named alone, as `make test-long` does."""
    if collection_path == _NIGHTLY and not any("nightly" in argument for argument in config.args):
        return True


def why_no_gpu() -> str | None:
    """Why tests marked `gpu` are skipped here, or None where they run."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU that torch can use"
    if torch.cuda.get_device_capability() < (7, 5):
        return f"needs a GPU of sm_75 or newer; this is {torch.cuda.get_device_name()}"
    return None


def pytest_collection_modifyitems(items):
    """Everything under tests/gpu is marked `gpu`, and what is marked `gpu` is skipped without one."""
    for item in items:
        if _GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
    needing = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if needing else None
    for item in needing if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def gpu() -> torch.device:
    """The GPU under test; skips the test on a machine without one."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())
