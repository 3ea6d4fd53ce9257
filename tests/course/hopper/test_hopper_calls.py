"""What notebook 09 says about plain calls: on small rows made for these tests, which are no measurements."""

from hypothesis import given
from hypothesis import strategies as st

from tests.course.recorded_rows import record, row
from twell_lab.course.hopper import calls


def call(tokens, path, ms, wall, workload="forward"):
    return row(path, ms, tokens=tokens, kind="host", workload=workload, wall_ms=wall)


ROWS = [
    call(tokens, path, ms, wall)
    for tokens, path, ms, wall in (
        (16384, "dense eager", 0.2, 1.6),
        (1, "dense eager", 0.1, 0.11),
        (16384, "twell", 0.2, 0.8),
        (1, "twell", 0.12, 0.15),
    )
]


def test_the_newest_calls_without_gradients_are_read(keep):
    bare = [{key: value for key, value in each.items() if key != "where"} for each in ROWS]
    training = [each | {"workload": "forward and backward"} for each in bare]
    keep(
        record("host-time", "2026-01-01T00:00:00Z", [each | {"ms": 9.0} for each in bare]),
        record("host-time", "2026-01-02T00:00:00Z", [*bare, *training]),
        record("inference", "2026-01-03T00:00:00Z", [row()]),
    )
    found = calls.recorded()
    assert len(found) == 4 and {each["where"][:36] for each in found} == {"recorded on NVIDIA H100, 2026-01-02;"}


@given(st.integers(0, 50), st.lists(st.integers(0, 90), min_size=1, max_size=12))
def test_a_call_is_done_no_sooner_than_its_launches_and_its_kernels_allow(launch, kernels):
    returned, done = calls.timeline(launch, kernels)
    assert returned == launch * len(kernels)
    assert done >= max(returned + kernels[-1], launch + sum(kernels)) and done <= returned + sum(kernels)
    assert calls.timeline(launch, [0] * len(kernels)) == (returned, returned)
