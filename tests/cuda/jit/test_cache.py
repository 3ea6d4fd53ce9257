"""The cubin cache and what surrounds the compiler, with a stand-in for NVRTC: none of this needs CuPy."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from twell_lab import core
from twell_lab.core import CompileError, DeviceError, InputError, StackError
from twell_lab.cuda import cubins, macros, prebuild, registry

SOURCE = '#include "outer.cuh"\n#include <cuda_fp16.h>\nextern "C" __global__ void k() {}\n'


@pytest.fixture(autouse=True)
def no_prebuilt_cubins(monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CUBINS", raising=False)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of sources in the place of kernels/: k.cu includes outer.cuh, which includes inner.cuh."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "k.cu").write_text(SOURCE)
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

    monkeypatch.setattr(cubins, "_run_nvrtc", run)
    monkeypatch.setattr(cubins, "compiler", lambda: (12, 9))
    return made


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "deeper"


def compile(folder, file="k.cu", arch="sm_90", **defines):
    return cubins.compile(file, arch, defines, cache_in=folder)


# ---- hits and misses ----


def test_the_second_time_nothing_is_compiled(kernels, runs, folder):
    first = compile(folder, N=3)
    again = compile(folder, N=3)
    assert runs == [("k.cu", "sm_90", {"N": 3})]
    assert first == again and again.log == "log 1\nof k.cu\n"
    assert first.name.startswith("k-sm_90-") and first.name.endswith("-nvrtc12.9")
    assert sorted(p.name for p in folder.iterdir()) == [f"{first.name}.cubin", f"{first.name}.log"]
    assert (folder / f"{first.name}.cubin").read_bytes() == first.image


@pytest.mark.parametrize("name", ["k.cu", "outer.cuh", "inner.cuh"])
def test_a_change_of_any_source_compiles_again_and_back_again_hits(kernels, runs, folder, name):
    first, before = compile(folder), (kernels / name).read_text()
    (kernels / name).write_text(before + "// one more line\n")
    second = compile(folder)
    assert len(runs) == 2 and second.name != first.name and second.image != first.image
    (kernels / name).write_text(before)
    assert compile(folder) == first and len(runs) == 2


def test_a_file_that_is_not_included_changes_nothing(kernels, runs, folder):
    first = compile(folder)
    (kernels / "other.cuh").write_text("#define OTHER 2\n")
    assert compile(folder) == first and len(runs) == 1


def test_headers_that_trade_their_texts_are_other_headers(kernels, runs, folder):
    (kernels / "k.cu").write_text('#include "a.cuh"\n#include "b.cuh"\n')
    (kernels / "a.cuh").write_text("#define A 1\n"), (kernels / "b.cuh").write_text("#define A 2\n")
    first = compile(folder)
    (kernels / "a.cuh").write_text("#define A 2\n"), (kernels / "b.cuh").write_text("#define A 1\n")
    assert compile(folder).name != first.name


def test_macros_architecture_and_compiler_are_told_apart(kernels, runs, folder, monkeypatch):
    variants = [dict(), dict(N=1), dict(N=2), dict(N=True), dict(M=1), dict(N=1, M=1), dict(arch="sm_80"), dict(N="11")]
    names = {compile(folder, **variant).name for variant in variants}
    assert len(names) == len(runs) == len(variants)
    monkeypatch.setattr(cubins, "compiler", lambda: (13, 0))
    assert compile(folder).name not in names and len(runs) == len(variants) + 1
    assert compile(folder, M=1, N=1) and compile(folder, N=1, M=1) and len(runs) == len(variants) + 2


def test_the_same_text_under_another_name_is_another_kernel(kernels, runs, folder):
    (kernels / "l.cu").write_text(SOURCE)
    assert compile(folder).name != compile(folder, "l.cu").name and len(runs) == 2


def test_a_source_or_header_that_is_not_there(kernels, runs, folder):
    with pytest.raises(CompileError, match="no kernel source missing.cu"):
        compile(folder, "missing.cu")
    (kernels / "k.cu").write_text('#include "lost.cuh"\n')
    with pytest.raises(CompileError, match="no kernel source lost.cuh"):
        compile(folder)
    assert not runs


# ---- a damaged cache ----


def spoil_truncate(cubin, log):
    cubin.write_bytes(cubin.read_bytes()[:-1])


def spoil_flip(cubin, log):
    cubin.write_bytes(cubin.read_bytes().replace(b"E", b"F", 1))


def spoil_empty(cubin, log):
    cubin.write_bytes(b"")


def spoil_no_log(cubin, log):
    log.unlink()


def spoil_no_cubin(cubin, log):
    cubin.unlink()


def spoil_empty_log(cubin, log):
    log.write_bytes(b"")


def spoil_log_of_another(cubin, log):
    log.write_text(hashlib.sha256(b"another").hexdigest() + "\nlog\n")


def spoil_log_of_no_text(cubin, log):
    log.write_bytes(b"\xff\xfe\x80")


def spoil_folder(cubin, log):
    log.unlink()
    log.mkdir()


SPOILERS = [v for name, v in list(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda s: s.__name__)
@pytest.mark.filterwarnings("ignore:kernel cache not written")
def test_a_damaged_entry_is_compiled_again(kernels, runs, folder, spoil):
    first = compile(folder)
    spoil(folder / f"{first.name}.cubin", folder / f"{first.name}.log")
    again = compile(folder)
    assert len(runs) == 2 and again.image.startswith(b"\x7fELF image 2")
    if spoil is not spoil_folder:
        assert compile(folder) == again and len(runs) == 2  # and mended


# ---- a cache that cannot be written ----


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_disk_or_a_read_only_folder_only_warns(kernels, runs, folder, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(UserWarning, match=os.strerror(number)):
        cubin = compile(folder)
    assert cubin.image.startswith(b"\x7fELF") and cubin.log
    assert not list(folder.iterdir())  # nothing half-written, nothing left behind
    with pytest.warns(UserWarning):
        compile(folder)
    assert len(runs) == 2


def test_a_cache_folder_under_a_file_only_warns(kernels, runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="kernel cache not written"):
        assert compile(tmp_path / "file" / "cache").image


def test_several_at_once_write_one_whole_entry(kernels, runs, folder):
    barrier, found = threading.Barrier(6), []

    def work():
        barrier.wait()
        found.append(compile(folder))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len({cubin.name for cubin in found}) == 1
    # Images differ here, so cubin and log may come from two writers: then the entry counts as none.
    assert len(list(folder.iterdir())) == 2
    before, last = len(runs), compile(folder)
    assert compile(folder) == last and len(runs) <= before + 1


# ---- cubins compiled elsewhere ----


def test_cubins_compiled_elsewhere_come_first_and_need_no_compiler(kernels, runs, folder, tmp_path, monkeypatch):
    there = tmp_path / "elsewhere"
    made = compile(there, N=3)
    here = compile(folder, N=3)
    assert here.image != made.image
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(there))

    def no_compiler():
        raise StackError("no compiler")

    monkeypatch.setattr(cubins, "compiler", no_compiler)
    found = compile(folder, N=3)
    assert found.name == made.name and found.image == made.image and len(runs) == 2
    (there / f"{made.name}.cubin").rename(there / f"{made.name.replace('12.9', '13.0')}.cubin")
    assert compile(folder, N=3).image == made.image  # whatever NVRTC they come from
    with pytest.raises(StackError):
        compile(folder, N=4)  # not among them


def test_cubins_of_other_sources_are_left_alone(kernels, runs, folder, tmp_path, monkeypatch):
    made = compile(tmp_path / "elsewhere")
    (kernels / "inner.cuh").write_text("#define INNER 2\n")
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path / "elsewhere"))
    assert compile(folder).image != made.image and len(runs) == 2


def test_prebuilding_makes_what_launching_asks_for(runs, tmp_path, monkeypatch):
    names = prebuild.prebuild(tmp_path, ["sm_90"], [torch.bfloat16, torch.float32], [2048])
    assert len(names) == len(set(names)) == len(runs)
    assert sorted(p.stem for p in tmp_path.glob("*.cubin")) == sorted(names)
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path))
    before = len(runs)
    for dtype in (torch.bfloat16, torch.float32):
        for teams in (1, macros.TEAMS):
            defines = dict(macros.specialisation(dtype, 2048, teams))
            assert cubins.compile("smxx_gated.cu", "sm_90", defines).name in names
        assert cubins.compile("smxx_pack.cu", "sm_90", dict(macros.value(dtype))).name in names
    for kernel, defines in registry.builds((9, 0), [torch.bfloat16, torch.float32], [2048]):
        assert cubins.compile(kernel.file, cubins.architecture((9, 0), kernel.file), dict(defines)).name in names
    assert len(runs) == before


@pytest.mark.filterwarnings("ignore:kernel cache not written")
def test_prebuilding_where_nothing_can_be_written(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write in the folder"):
        prebuild.prebuild(tmp_path / "file", ["sm_90"], [torch.bfloat16], [2048])
    assert runs == []  # said before anything was compiled


# ---- which architecture ----


def offering(monkeypatch, *targets):
    monkeypatch.setattr(cubins, "_nvrtc", lambda: types.SimpleNamespace(getSupportedArchs=lambda: list(targets)))


@pytest.mark.parametrize(
    "capability, expected",
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_the_newest_target_of_the_same_major_version(monkeypatch, capability, expected):
    offering(monkeypatch, 75, 80, 86, 89, 90, 100, 120)
    assert cubins.architecture(capability, "smxx_pack.cu") == expected


def test_hopper_files_get_hoppers_own_features(monkeypatch):
    offering(monkeypatch, 75, 80, 90, 100)
    assert cubins.architecture((9, 0), "sm90_gate_pack.cu") == "sm_90a"
    assert cubins.architecture((10, 0), "smxx_pack.cu") == "sm_100"


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (3, 5)])
def test_a_gpu_that_is_too_old_is_named(monkeypatch, capability):
    offering(monkeypatch, 50, 60, 70, 75)
    with pytest.raises(DeviceError, match=f"sm_{capability[0]}{capability[1]}.*sm_75"):
        cubins.architecture(capability, "smxx_pack.cu")


def test_a_gpu_that_the_compiler_does_not_know_is_named(monkeypatch):
    offering(monkeypatch, 75, 80, 86, 89, 90)
    with pytest.raises(DeviceError, match=r"sm_120.*\[75, 80, 86, 89, 90\]"):
        cubins.architecture((12, 0), "smxx_pack.cu")
    offering(monkeypatch, 86, 89)
    with pytest.raises(DeviceError, match="sm_80"):  # older than every target of its major version
        cubins.architecture((8, 0), "smxx_pack.cu")


def test_the_cubin_folder_says_what_it_offers(monkeypatch, tmp_path):
    for name in ("smxx_pack-sm_80-0123-nvrtc12.9", "smxx_pack-sm_120-0123-nvrtc12.9"):
        (tmp_path / f"{name}.cubin").write_bytes(b"")
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path))
    monkeypatch.setattr(cubins, "_nvrtc", lambda: pytest.fail("the compiler was asked"))
    assert cubins.architecture((8, 9), "smxx_pack.cu") == "sm_80"
    assert cubins.architecture((12, 1), "smxx_pack.cu") == "sm_120"
    with pytest.raises(DeviceError, match="sm_90"):
        cubins.architecture((9, 0), "smxx_pack.cu")


# ---- no compiler ----


@pytest.fixture
def forgetful():
    cubins.compiler.cache_clear()
    yield
    cubins.compiler.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_without_cupy_the_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    for call in (
        cubins.compiler,
        lambda: cubins.compile("smxx_pack.cu", "sm_90", {}, cache_in=tmp_path),
        lambda: cubins.architecture((9, 0), "smxx_pack.cu"),
    ):
        with pytest.raises(StackError, match=r"pip install 'twell-lab\[cu12\]'.*pip install 'twell-lab\[compile\]'"):
            call()


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("error", [ImportError("libnvrtc.so.12: cannot open"), RuntimeError("no NVRTC"), OSError("x")])
def test_without_nvrtc_the_reason_is_told(monkeypatch, error):
    def fail():
        raise error

    nvrtc = types.SimpleNamespace(getVersion=fail)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nvrtc=nvrtc))
    with pytest.raises(StackError, match=f"{type(error).__name__}: {error}"):
        cubins.compiler()


def test_importing_needs_no_cupy():
    program = (
        "import sys\nsys.modules['cupy'] = sys.modules['cuda'] = None\n"
        "import twell_lab.cuda.cubins, twell_lab.ops.portable, twell_lab.ops\n"
        "import torch\nassert not torch.cuda.is_initialized()\n"
        "print(twell_lab.ops.portable.specialisation(torch.bfloat16, 2048))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(cubins.__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "D_MODEL" in done.stdout


def test_importing_loads_no_cupy():
    program = (
        "import sys, twell_lab.cuda.cubins, twell_lab.ops.portable\nassert not {'cupy', 'cuda.pathfinder'} & "
        "set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(cubins.__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_cupy_is_given_a_cache_folder_where_it_cannot_make_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("TWELL_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    core.let_cupy_start()
    assert "CUPY_CACHE_DIR" not in os.environ
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("CUPY_CACHE_DIR", "chosen")
    core.let_cupy_start()
    assert os.environ["CUPY_CACHE_DIR"] == "chosen"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    core.let_cupy_start()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "cache")


# ---- what ptxas says ----

LOG = """\
ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'gated_v2' for 'sm_90'
ptxas info    : Function properties for gated_v2
    24 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 64 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'gated_v1' for 'sm_90'
ptxas info    : Function properties for gated_v1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 8208 bytes smem
"""


def test_resources_are_read_from_the_log():
    assert cubins.resources(LOG) == {
        "gated_v2": {"registers": 255, "spill_bytes": 28, "stack_bytes": 24, "shared_bytes": 64},
        "gated_v1": {"registers": 48, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 8208},
    }
    assert cubins.resources("") == {}
