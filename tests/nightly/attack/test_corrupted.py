"""Damaged files of every kind."""

import sys

import pytest

from tests.nightly.attack.harness import isolated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds processes as Linux does")


def test_damaged_files(extent, report):
    counts = isolated("damaged files", "tests.nightly.attack.corrupted:check", **extent(4000))
    report("damaged files", {"cases": counts.pop("checked"), "by": {k: v for k, v in counts.items() if k != "cases"}})
