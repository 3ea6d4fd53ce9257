"""Every subcommand with hostile arguments."""

import sys

import pytest

from tests.nightly.attack import commands
from tests.nightly.attack.harness import isolated, randomness

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds processes as Linux does")


def test_hostile_arguments(extent, report):
    counts = isolated("commands", "tests.nightly.attack.commands:check", **extent(3000))
    report(
        "hostile command lines",
        {"cases": counts.pop("checked"), "by": {k: v for k, v in counts.items() if k != "cases"}},
    )


def test_every_command_is_asked():
    asked = {commands.arguments(randomness("commands", 0, number))[0] for number in range(200)}
    assert asked == set(commands.COMMANDS)
    from twell_lab.app.cli import _parser

    every = set(next(iter(_parser()._subparsers._group_actions)).choices)
    assert set(commands.COMMANDS) == every - {"tour"}  # which takes too long
