"""Layers whose firing is known, and rates that need no measuring."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.threads import one_thread  # noqa: F401
from twell_lab.analysis.costs import Rates
from twell_lab.analysis.profile import profile
from twell_lab.ops import clock

H100 = Rates(
    "an H100's, rounded", "bfloat16", bandwidth=3.0e12, l2=7.4e12, matmul=7.0e14, launch=2.5e-6, cache=50_000_000
)


@pytest.fixture
def rates():
    """As if this CPU reached them: a plan made with them is for models on it."""
    return replace(H100, device="CPU", dtype="float32")


@pytest.fixture(scope="session")
def layer():
    """(gated layer, three inputs): d_model 32, d_ff 600, a mean of 20 neurons firing, a few of them often."""
    return clock.workload(90, 32, 600, 20, "lognormal", torch.float32, "cpu")


@pytest.fixture(scope="session")
def profiled(layer):
    module, inputs = layer
    return profile(module, inputs[:1])
