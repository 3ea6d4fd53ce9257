"""kill -9 in the middle of trainings, preparations and saves."""

import sys

import pytest

from tests.nightly.attack import kills
from tests.nightly.attack.harness import attack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes as Linux does")


def test_trainings_that_are_killed_and_resumed(extent, report):
    """Five runs, each killed once or more often."""
    counts = attack("kills", kills.check_training, **extent(50))
    report("trainings killed and resumed", {"cases": counts["checked"], "kills": counts["kills"], "by": counts})


def test_saves_that_are_killed(extent, report):
    counts = attack("saves", kills.check_writer, **extent(400))
    report("saves killed", {"cases": counts["checked"], "kills": counts.get("kills", 0), "by": counts})
