"""Every subcommand with hostile arguments, and damaged files of every kind, in processes of their own."""

import sys

import pytest

from tests.nightly.attack import commands
from tests.nightly.attack.harness import isolated, randomness

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds processes as Linux does")


@pytest.mark.parametrize(
    "name, file, cases", [("hostile command lines", "commands", 3000), ("damaged files", "corrupted", 4000)]
)
def test_what_may_crash_or_hang(extent, report, name, file, cases):
    counts = isolated(name, f"tests.nightly.attack.{file}:check", **extent(cases))
    report(name, {"cases": counts.pop("checked"), "by": {k: v for k, v in counts.items() if k != "cases"}})


def test_every_command_is_asked():
    asked = {commands.arguments(randomness("hostile command lines", 0, number))[0] for number in range(200)}
    assert asked == set(commands.COMMANDS)
    from twell_lab.app.cli import _parser

    every = set(next(iter(_parser()._subparsers._group_actions)).choices)
    assert set(commands.COMMANDS) == every - {"tour"}  # which takes too long
