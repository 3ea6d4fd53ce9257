"""How much of an attack a test runs, and where its counts go."""

import json
import os
from pathlib import Path

import pytest

from tests.nightly.attack.harness import PLACE
from tests.threads import one_thread  # noqa: F401

_REPORT = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[_REPORT] = []


def pytest_sessionfinish(session):
    if path := session.config.getoption("--attack-report"):
        Path(path).write_text(json.dumps(session.config.stash[_REPORT], indent=1) + "\n")


@pytest.fixture(autouse=True, scope="session")
def place(tmp_path_factory):
    """Where the attacks write, also in the processes that they start."""
    os.environ[PLACE] = str(tmp_path_factory.mktemp("attack"))
    yield
    del os.environ[PLACE]


@pytest.fixture
def extent(request):
    """extent(cases) -> {"seed", "cases", "number"}: so many cases, or as many as were asked for, or one alone."""
    option = request.config.getoption

    def of(cases: int) -> dict:
        asked = option("--attack-cases") or cases
        return {"seed": option("--attack-seed"), "cases": asked, "number": option("--attack-case")}

    return of


@pytest.fixture
def report(request):
    """report(name, counts): keeps what a fuzzer did for --attack-report."""
    return lambda name, counts: request.config.stash[_REPORT].append({"attack": name, **counts})
