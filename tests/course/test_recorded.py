"""Recorded times and times of now: what counts as one measurement, and what is said where nothing is timed."""

from dataclasses import replace

import pytest
import torch

from tests.course.recorded_rows import record, row
from twell_lab.core import TwellError
from twell_lab.course import recorded


@pytest.mark.parametrize(
    "other, alike",
    [
        ({"nnz": 29.4}, True),
        ({"ms": 9.0}, True),
        ({"nnz": 27.0}, False),
        ({"tokens": 1}, False),
        ({"layer": 3}, False),
        ({"workload": "overflow: x"}, False),
        ({"gated": False}, False),
        ({"kind": "gate"}, False),
    ],
)
def test_what_counts_as_the_same_measurement(other, alike):
    assert (recorded.same(row(nnz=29.0)) == recorded.same(row(nnz=29.0) | other)) == alike


def test_of_the_same_measurement_the_newest_is_read(keep):
    keep(
        record("a", "2026-01-01T00:00:00Z", [row(ms=3.0), row(ms=4.0, nnz=8.0)]),
        record("b", "2026-01-03T00:00:00Z", [row(ms=5.0)]),
        record(
            "a-again",
            "2026-01-02T00:00:00Z",
            [row(ms=1.0), row(ms=2.0, device="Another GPU"), row(ms=6.0, kind="plan")],
            kernels=(),
        ),
    )
    found = recorded.newest("a", "H100", lambda each: each["kind"] == "inference")
    assert [each["ms"] for each in found] == [1.0, 4.0]
    for each, day, earlier in zip(found, ("2026-01-02", "2026-01-01"), (False, True), strict=True):
        assert "NVIDIA H100" in each["where"] and day in each["where"]
        assert ("commit" in each["where"]) == earlier  # the version, where kernels have changed since


@pytest.mark.parametrize("kernels, commit", [(("gone",), "0123abcd"), ((), None)])
def test_a_record_with_earlier_kernels_names_its_commit(kernels, commit):
    made = replace(record("a", "2026-01-01T00:00:00Z", [row()], kernels), commit="0123abcd")
    assert recorded.earlier_commit(made) == commit


@pytest.mark.parametrize("error", [TwellError("too old"), torch.OutOfMemoryError("too old"), RuntimeError("too old")])
def test_what_a_gpu_refuses_is_said(error, my_gpu, capsys):
    def refuse():
        raise error

    assert recorded.timed_here(refuse) == []
    assert capsys.readouterr().out == "Nothing was timed on My GPU: too old\n"
    assert recorded.timed_here(lambda: [row()]) == [row()]
    assert recorded.timed_here(lambda: [{"ms": 1.0}]) == [{"where": "yours, now, on My GPU", "ms": 1.0}]


def test_a_mistake_in_the_code_is_no_refusal(my_gpu):
    with pytest.raises(ZeroDivisionError):
        recorded.timed_here(lambda: 1 / 0)


@pytest.mark.parametrize(
    "points, met", [([(8, 2.0), (29, 1.0), (60, 0.5)], (29, 60)), ([(60, 0.5), (8, 2.0)], (8, 60)), ([(8, 0.9)], None)]
)
def test_where_something_stops_being_as_fast_as_dense(points, met):
    assert recorded.crossed(points) == met
