"""Damaged files of every kind; and proof that what hangs, crashes or takes all memory is seen."""

import sys

import pytest

from tests.nightly.attack.harness import isolated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds processes as Linux does")


def test_damaged_files(extent, report):
    counts = isolated("damaged files", "tests.nightly.attack.corrupted:check", **extent(4000))
    report("damaged files", {"cases": counts.pop("checked"), "by": {k: v for k, v in counts.items() if k != "cases"}})


def hangs(r, counts):
    import time

    time.sleep(60 if r.random() < 0.3 else 0)


def crashes(r, counts):
    import ctypes

    if r.random() < 0.3:
        ctypes.string_at(0)


def takes_all_memory(r, counts):
    counts["here"] += 1
    if r.random() < 0.3:
        bytearray(1 << 50)


@pytest.mark.parametrize(
    "name, match",
    [("hangs", "not done within 1 s"), ("crashes", "the process ended: SIGSEGV"), ("takes_all_memory", "MemoryError")],
)
def test_what_hangs_crashes_or_takes_all_memory_is_a_failure_with_its_number(name, match):
    with pytest.raises(AssertionError, match=match) as told:
        isolated(
            name,
            f"tests.nightly.attack.test_corrupted:{name}",
            seed=0,
            cases=12,
            seconds=1.0 if name == "hangs" else 30.0,
        )
    assert "again: --attack-seed 0 --attack-case" in str(told.value)
