"""Every declared source beside its `.cu`, in bfloat16: for sm_80, and for sm_90a where it is for Hopper alone.
tests/nightly/test_compiling.py has all."""

import pytest
import torch

from tests.cuda import declared
from twell_lab import core, records, simulator
from twell_lab.core import StackError
from twell_lab.cuda import compile as compiler
from twell_lab.ops import kernels

USUAL = declared.usual()
try:
    compiler.compiler()
    NO_COMPILER = ""
except StackError as error:
    NO_COMPILER = f"kernels cannot be compiled here: {error}"


def test_every_file_is_declared():
    assert {f"{name}.cu" for name in kernels.sources()} == {path.name for path in core.kernels_dir().glob("*.cu")}
    assert set(records.kernel_hashes()) == set(kernels.sources())


@pytest.mark.parametrize("name", kernels.sources())
def test_a_build_of_each_entry_is_among_those_that_are_compiled_ahead(name):
    one = kernels.sources()[name]
    built = [dict(one.macros(macros)) for macros in one.builds(torch.bfloat16, [2048], (9, 0))]
    assert {entry for macros in built for entry in one.entries_of(macros)} == set(one.entries)
    assert all(dict(macros) in built for source, _, macros in USUAL if source == name)


@pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)
@pytest.mark.parametrize("job", USUAL, ids=declared.called)
def test_entries_threads_and_what_ptxas_used(job, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CUBINS", raising=False)  # a cubin from elsewhere comes without ptxas's words
    declared.check(*job)


@pytest.mark.skipif(not simulator.available(), reason="the simulator needs a C++ compiler")
@pytest.mark.parametrize("job", USUAL, ids=declared.called)
def test_parameters(job):
    name, _, macros = job
    one = kernels.sources()[name]
    assert declared.read(one, macros) == {
        entry: one.entries[entry].parameters for entry in one.entries_of(dict(macros))
    }
