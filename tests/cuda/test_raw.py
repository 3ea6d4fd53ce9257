"""tl.kernel without a GPU: which source and macros a name stands for, that these compile, and what is refused."""

import sys

import pytest
import torch

import twell_lab as tl
from twell_lab.core import DeviceError, InputError, StackError
from twell_lab.cuda import cubins, raw, registry


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
    kernel, entry, defines = raw.choose(name, macros)
    assert (kernel.name, entry) == (source, name.rpartition(".")[2])
    assert defines.items() >= some.items() and entry in kernel.entries(defines)


def test_every_entry_can_be_had():
    found = {
        f"{kernel.name}.{entry}" for kernel, defines in registry.usual_builds() for entry in kernel.entries(defines)
    }
    assert {name.partition(".")[0] for name in found} == set(registry.KERNELS)
    for name in found:
        raw.choose(name, {})


def test_an_entry_can_be_had_with_the_macros_of_its_build():
    for kernel, defines in registry.usual_builds():
        for entry in kernel.entries(defines):
            assert raw.choose(f"{kernel.name}.{entry}", dict(defines))[2].items() >= dict(defines).items()


@pytest.mark.parametrize("name", ["pack_v4", "smxx_down.down_v5", "sm80_gate_pack.gate_pack_v1", "decode_down"])
def test_what_was_chosen_compiles(name, tmp_path, monkeypatch):
    try:
        cubins.compiler()
    except StackError as error:
        pytest.skip(f"kernels cannot be compiled here: {error}")
    monkeypatch.delenv("TWELL_LAB_CUBINS", raising=False)
    kernel, entry, defines = raw.choose(name, {"VALUE_FP16": True})
    assert entry in cubins.resources(cubins.compile(kernel.file, "sm_80", defines, cache_in=tmp_path).log)


def test_names_that_cannot_be_had():
    with pytest.raises(InputError, match="no kernel is called 'pack_v9'; there are pack_v1, pack_v2, .*transpose_v1"):
        tl.kernel("pack_v9")
    with pytest.raises(InputError, match="no kernel is called 'transpose_v1' with VALUE_FP32=True; there are"):
        tl.kernel("transpose_v1", VALUE_FP32=True)
    with pytest.raises(InputError, match="sm90_gate_pack.gate_pack_v1 or sm80_gate_pack.gate_pack_v1 is accepted"):
        tl.kernel("gate_pack_v1")
    with pytest.raises(InputError, match="smxx_pack.cu and its headers know no macro 'VALUE_FP61'"):
        tl.kernel("pack_v1", VALUE_FP61=True)
    for name in (3, None, b"pack_v1"):
        with pytest.raises(InputError, match=f"name is a {type(name).__name__}"):
            tl.kernel(name)


def test_without_cupy(monkeypatch):
    monkeypatch.setattr(raw.machine, "check_stack", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(StackError, match="RawKernel needs CuPy; .*pip install"):
        tl.kernel("pack_v1")


def test_where_it_does_not_run(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr(raw.machine, "check_stack", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="pack_v1 needs a GPU"):
        tl.kernel("pack_v1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(DeviceError, match="decode_down runs on compute capability 8.0 and newer; this GPU has 7.5"):
        tl.kernel("decode_down")
    with pytest.raises(DeviceError, match="gate_up runs on compute capability 9.0 alone; this GPU has 7.5"):
        tl.kernel("gate_up")
