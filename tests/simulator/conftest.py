"""The compilers that the tests of source.py and toolchain.py run with."""

import shutil

import pytest

from twell_lab.simulator import toolchain


@pytest.fixture(params=["", *filter(shutil.which, ["clang++"])])
def cxx(request, monkeypatch):
    """The compiler that is taken by itself, and the other one where it is there; its name."""
    monkeypatch.setenv("TWELL_LAB_CXX", request.param)
    if not toolchain.available() or (request.param and toolchain._compiler("", "").name == request.param):
        pytest.skip(f"there is no other {request.param}")
    return toolchain.compiler().name
