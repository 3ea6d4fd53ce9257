"""What a profile takes, beside a plain forward: on a small model."""

import pytest

from twell_lab.bench import profiling
from twell_lab.models.tiny import ModelConfig
from twell_lab.records import Record

SHAPE = profiling.Shape(ModelConfig(d_model=32, layers=2, heads=2, d_ff=64, context=32), sequences=4)


def test_a_profile_is_timed_beside_a_plain_forward():
    plain, counted = rows = profiling.profiling_rows(SHAPE)
    assert (plain["path"], counted["path"]) == ("plain forward", "profile") and plain["times_plain"] == 1
    assert counted["times_plain"] == pytest.approx(counted["ms"] / plain["ms"], abs=1e-3)
    assert plain["tokens"] == 2 * 4 * 32 and 16 < counted["nnz"] < 48 and "random weights" in plain["workload"]
    Record.new("profiling", "a test's own", rows)
