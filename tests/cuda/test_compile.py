"""The compiler's cache and what surrounds it, with a stand-in for NVRTC; and a few calls of the real one."""

import sys
import types

import pytest
import torch

from tests.cuda import declared
from twell_lab import core
from twell_lab.core import CompileError, DeviceError, StackError
from twell_lab.cuda import compile as compiler
from twell_lab.ops import kernels

SOURCE = '#include "outer.cuh"\n#include <cuda_fp16.h>\nextern "C" __global__ void k() {}\n'


@pytest.fixture(autouse=True)
def no_prebuilt_cubins(monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CUBINS", raising=False)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder in the place of kernels/: k.cu includes outer.cuh, which includes inner.cuh."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "k.cu").write_text(SOURCE)
    (folder / "l.cu").write_text(SOURCE)
    (folder / "outer.cuh").write_text('#pragma once\n  #  include   "inner.cuh"\n')
    (folder / "inner.cuh").write_text('#pragma once\n#include "outer.cuh"\n#define INNER 1\n')
    (folder / "other.cuh").write_text("#define OTHER 1\n")
    monkeypatch.setattr(core, "kernels_dir", lambda: folder)
    return folder


@pytest.fixture
def runs(monkeypatch):
    """The compilations that really happened, each as (file, arch, defines); every image differs."""
    made = []

    def run(file, arch, defines):
        made.append((file, arch, dict(defines)))
        return b"\x7fELF image %d of %s" % (len(made), arch.encode()), f"log {len(made)}\nof {file}\n"

    monkeypatch.setattr(compiler, "_run_nvrtc", run)
    monkeypatch.setattr(compiler, "compiler", lambda: (12, 9))
    return made


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "deeper"


def compile(folder, file="k.cu", arch="sm_90", **defines):
    return compiler.compile(file, arch, defines, cache_in=folder)


def test_the_second_time_nothing_is_compiled(texts, runs, folder):
    first = compile(folder, N=3)
    second = compile(folder, N=3)
    assert runs == [("k.cu", "sm_90", {"N": 3})] and first == second and second.log == "log 1\nof k.cu\n"
    assert first.name.startswith("k-sm_90-") and first.name.endswith("-nvrtc12.9")
    assert sorted(p.name for p in folder.iterdir()) == [f"{first.name}.cubin", f"{first.name}.log"]
    assert (folder / f"{first.name}.cubin").read_bytes() == first.image


@pytest.mark.parametrize("name, compiled", [("k.cu", 2), ("outer.cuh", 2), ("inner.cuh", 2), ("other.cuh", 1)])
def test_a_change_of_what_is_included_compiles_anew_and_taking_it_back_hits(texts, runs, folder, name, compiled):
    first, before = compile(folder), (texts / name).read_text()
    (texts / name).write_text(before + "// one more line\n")
    second = compile(folder)
    assert len(runs) == compiled and (second == first) == (compiled == 1)
    (texts / name).write_text(before)
    assert compile(folder) == first and len(runs) == compiled


def test_files_macros_architectures_and_compilers_have_entries_of_their_own(texts, runs, folder, monkeypatch):
    variants = [{}, {"N": 1}, {"N": 2}, {"N": True}, {"N": "11"}, {"M": 1}, {"N": 1, "M": 1}]
    variants += [{"arch": "sm_80"}, {"file": "l.cu"}]
    names = {compile(folder, **variant).name for variant in variants}
    assert len(names) == len(runs) == len(variants)
    assert compile(folder, M=1, N=1).name in names and len(runs) == len(variants)
    monkeypatch.setattr(compiler, "compiler", lambda: (13, 0))
    assert compile(folder).name not in names and len(runs) == len(variants) + 1


def test_a_source_or_header_that_is_not_there(texts, runs, folder):
    with pytest.raises(CompileError, match="no kernel source missing.cu"):
        compile(folder, "missing.cu")
    (texts / "k.cu").write_text('#include "lost.cuh"\n')
    with pytest.raises(CompileError, match="no kernel source lost.cuh"):
        compile(folder)
    assert not runs


def test_a_folder_under_a_file_only_warns(texts, runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="kernel cache not written"):
        assert compile(tmp_path / "file" / "cache").image


def test_cubins_compiled_elsewhere_come_first_and_need_no_compiler(texts, runs, folder, tmp_path, monkeypatch):
    there = tmp_path / "elsewhere"
    made = compile(there, N=3)
    assert compile(folder, N=3).image != made.image
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(there))

    def no_compiler():
        raise StackError("no compiler")

    monkeypatch.setattr(compiler, "compiler", no_compiler)
    assert compile(folder, N=3).image == made.image and len(runs) == 2
    (there / f"{made.name}.cubin").rename(there / f"{made.name.replace('12.9', '13.0')}.cubin")
    assert compile(folder, N=3).image == made.image  # whatever NVRTC they come from
    (texts / "inner.cuh").write_text("#define INNER 2\n")
    with pytest.raises(StackError):
        compile(folder, N=3)  # of other sources


def test_prebuilding_makes_what_launches_ask_for(runs, tmp_path, monkeypatch):
    dtypes = [torch.bfloat16, torch.float32]
    names = kernels.prebuild(tmp_path, ["sm_90"], dtypes, [2048])
    assert len(names) == len(set(names)) == len(runs)
    assert sorted(p.stem for p in tmp_path.glob("*.cubin")) == sorted(names)
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path))
    for source, target, macros in kernels.builds((9, 0), dtypes, [2048]):
        assert target == compiler.architecture((9, 0), source.alone)
        assert compiler.compile(source.file, target, dict(macros)).name in names
    assert len(runs) == len(names)


ALL = (75, 80, 86, 89, 90, 100, 120)


@pytest.mark.parametrize(
    "capability, offered, wanted",
    [
        *(((int(str(n)[:-1]), n % 10), ALL, f"sm_{n}") for n in ALL),
        ((8, 7), ALL, "sm_86"),
        ((10, 3), ALL, "sm_100"),
        ((12, 1), ALL, "sm_120"),
        ((7, 0), ALL, r"this GPU is sm_70; .*sm_75"),
        ((3, 5), ALL, r"this GPU is sm_35; .*sm_75"),
        ((12, 0), (75, 80, 90), r"sm_120.*\[75, 80, 90\]"),
        ((8, 0), (86, 89), "sm_80"),  # older than every target of its major version
    ],
)
@pytest.mark.parametrize("prebuilt", [False, True])
def test_the_newest_target_of_the_same_major_version(monkeypatch, tmp_path, prebuilt, capability, offered, wanted):
    if prebuilt:  # the folder says what it offers
        monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path))
        monkeypatch.setattr(compiler, "_nvrtc", lambda: pytest.fail("the compiler was asked"))
        for number in offered:
            (tmp_path / f"smxx_pack-sm_{number}-0123-nvrtc12.9.cubin").write_bytes(b"")
    else:
        offer = types.SimpleNamespace(getSupportedArchs=lambda: [*offered])
        monkeypatch.setattr(compiler, "_nvrtc", lambda: offer)
    if capability < (7, 5) or capability not in [divmod(n, 10) for n in offered] and len(offered) < len(ALL):
        with pytest.raises(DeviceError, match=wanted):
            compiler.architecture(capability)
    else:
        assert compiler.architecture(capability) == wanted


def test_without_cupy_the_command_is_named(monkeypatch, tmp_path):
    compiler.compiler.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    compiled = lambda: compiler.compile("smxx_pack.cu", "sm_90", {}, cache_in=tmp_path)  # noqa: E731
    for call in (compiler.compiler, compiled, lambda: compiler.architecture((9, 0))):
        with pytest.raises(StackError, match=r"pip install 'cupy-cuda12x\[ctk\]'.*pip install cupy-cuda12x nvidia"):
            call()


@pytest.fixture
def nvrtc():
    try:
        return compiler.compiler()
    except StackError as error:
        pytest.skip(f"kernels cannot be compiled here: {error}")


@pytest.mark.parametrize(
    "source, message",
    [
        ('extern "C" __global__ void k() { int x = ; }', "expected an expression"),
        ('extern "C" __global__ void k() { undeclared(); }', "undeclared"),
        ("#include <no_such_header.h>\n", "no_such_header"),
        ('#if N != 3 || !defined(FLAG)\n#error "not so"\n#endif\n', "not so"),
    ],
    ids=["syntax", "name", "header", "#error"],
)
def test_a_source_that_does_not_compile_comes_with_the_compilers_log(nvrtc, source, message, texts, folder):
    (texts / "k.cu").write_text(source)
    with pytest.raises(CompileError, match=rf"(?s)k\.cu for sm_90.*{message}"):
        compile(folder, N=4)
    assert not folder.exists()
    if message == "not so":  # macros reach the source
        (texts / "k.cu").write_text(source + 'extern "C" __global__ void k() {}\n')
        assert "k" in declared.resources(compile(folder, N=3, FLAG=True).log)


def test_this_compiler_knows_every_architecture_and_no_other(nvrtc, folder):
    assert nvrtc >= (12, 8)
    for name in compiler.ARCHITECTURES:
        assert compiler.architecture(divmod(int(name.removeprefix("sm_")), 10)) == name
    with pytest.raises(CompileError, match="smxx_pack.cu for sm_999"):
        compile(folder, "smxx_pack.cu", "sm_999", VALUE_BF16=True)
