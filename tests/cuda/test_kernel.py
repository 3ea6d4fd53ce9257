"""tl.kernel without a GPU: which source and macros a name stands for, and what is refused. That these compile:
test_declared.py."""

import sys

import pytest
import torch

import twell_lab as tl
from twell_lab.core import DeviceError, InputError, StackError
from twell_lab.ops import kernels


@pytest.mark.parametrize(
    "name, macros, source, some",
    [
        ("pack_v1", {}, "smxx_pack", {"VALUE_BF16": True}),
        ("pack_v4", {"VALUE_FP32": True}, "smxx_pack", {"VALUE_FP32": True}),
        ("gated_v2", {"VALUE_FP16": True, "D_MODEL": 4096}, "smxx_gated", {"D_MODEL": 4096, "WARPS": 4}),
        ("down_v6", {}, "smxx_down", {"POOL": True, "HIDDEN": True, "D_MODEL": 2048}),
        ("smxx_down.down_v3", {}, "smxx_down", {"TEAMS": 8}),
        ("sm80_gate_pack.gate_pack_v2", {}, "sm80_gate_pack", {"VERSION": 2, "BK": 64}),
        ("gate_pack_v0", {"BIAS": 1}, "sm90_gate_pack", {"VERSION": 0, "BIAS": 1}),
        ("transpose_v1", {"SIDE": 32}, "smxx_transpose", {"SIDE": 32, "VALUE_BF16": True}),
    ],
)
def test_a_name_finds_its_source_and_its_macros(name, macros, source, some):
    chosen, entry, defines = kernels.choose(name, macros)
    assert (chosen.name, entry) == (source, name.rpartition(".")[2])
    assert defines.items() >= some.items() and entry in chosen.entries_of(defines)


def test_an_entry_can_be_had_as_usual_and_with_the_macros_of_each_of_its_builds():
    for source, _, macros in kernels.builds((9, 0), [torch.bfloat16], [2048]):
        for entry in source.entries_of(dict(macros)):
            name = f"{source.name}.{entry}"
            assert entry in source.entries_of(kernels.choose(name, {})[2])
            assert kernels.choose(name, dict(macros))[2].items() >= dict(macros).items()


@pytest.mark.parametrize(
    "name, macros, message",
    [
        ("pack", {}, "no kernel is called 'pack'; accepted: pack_v1, pack_v2, pack_v3, pack_v4; "),
        ("pakc_v2", {}, "no kernel is called 'pakc_v2'; accepted: pack_v2, [^;]*pack_v4"),
        ("", {}, "no kernel is called ''; accepted: one that is; docs/kernels/README.md lists all"),
        ("gate_pack_v1", {}, "gate_pack_v1 is in several sources; sm80_gate_pack.gate_pack_v1 or "),
        ("pack_v1", {"VALUE_FP61": True}, "smxx_pack.cu and its headers know no macro 'VALUE_FP61'"),
        *((name, {}, f"name is a {type(name).__name__}") for name in (3, None, b"pack_v1")),
    ],
)
def test_names_that_cannot_be_had(name, macros, message):
    with pytest.raises(InputError, match=message):
        tl.kernel(name, **macros)


@pytest.mark.parametrize("name", sorted(kernels.sources()))
def test_the_description_of_every_kernel_says_its_arguments_and_how_it_is_launched(name):
    source = kernels.sources()[name]
    for entry in source.entries:
        first, *others = kernels.describe(f"{name}.{entry}").splitlines()
        kinds = first.rpartition(": ")[2].split(", ")
        assert len(kinds) == len(source.entries[entry].parameters) and source.file in first
        assert others[0].startswith("//") and any("launch(" in line for line in others)


def test_without_cupy(monkeypatch):
    monkeypatch.setattr(kernels.core, "check_stack", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StackError, match="RawKernel needs CuPy; .*pip install"):
        tl.kernel("pack_v1")


def test_where_it_does_not_run(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr(kernels.core, "check_stack", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="pack_v1 needs a GPU"):
        tl.kernel("pack_v1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(DeviceError, match="decode_down runs on compute capability 8.0 and newer; this GPU has 7.5"):
        tl.kernel("decode_down")
    with pytest.raises(DeviceError, match="gate_up runs on compute capability 9.0 alone; this GPU has 7.5"):
        tl.kernel("gate_up")
