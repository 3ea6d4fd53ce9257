"""From sources to a library: the compiler and its messages, shared variables, source lines, and the cache."""

import errno
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.simulator.declarations import DECLARES, KERNEL, MORE, SHARED
from twell_lab import core
from twell_lab.core import CompileError, StackError
from twell_lab.simulator import toolchain
from twell_lab.simulator.faults import Unsupported
from twell_lab.simulator.symbols import Line
from twell_lab.simulator.toolchain import build

if not toolchain.available():
    pytest.skip("the simulator needs g++ on Linux", allow_module_level=True)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A stand-in for the simulator's C++ that compiles in no time."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "cuda_on_cpu.h").write_text(
        "#ifdef SIM_LISTING\n#define __global__ SIM_GLOBAL\n#else\n#define __global__\n#endif\n"
        '#define SIM_EXPORT(k) extern "C" void* sim_call_##k() { return (void*)&k; }\n'
    )
    (folder / "runtime.cpp").write_text("int sim_version() { return 1; }\n")
    monkeypatch.setattr(toolchain, "CUDA", folder)
    return folder


@pytest.mark.parametrize("named", ["no-such-compiler", "true"])
def test_a_named_compiler_that_does_not_work_is_an_error_that_says_what_to_install(named, monkeypatch):
    monkeypatch.setenv("TWELL_LAB_CXX", named)
    with pytest.raises(StackError, match=r"apt install g\+\+") as caught:
        toolchain.compiler()
    assert named in str(caught.value)
    assert not toolchain.available()


@pytest.mark.parametrize(("platform", "machine"), [("win32", "x86_64"), ("darwin", "arm64"), ("linux", "riscv64")])
def test_other_systems_are_told_where_it_runs(platform, machine, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    with pytest.raises(StackError, match="WSL 2"):
        toolchain.compiler()
    assert not toolchain.available()


def messages_of(text, **headers):
    with pytest.raises(CompileError) as caught:
        build({"k.cu": text, **headers}, "k.cu")
    message = str(caught.value)
    assert str(core.cache_dir()) not in message and tempfile.gettempdir() not in message and "sim_unit" not in message
    assert len(message.splitlines()) <= 22
    return message


def test_a_syntax_error_reads_as_the_compiler_said_it():
    message = messages_of(KERNEL % "  x[0] = 1\n  x[1] = 2;")
    assert message.startswith("k.cu does not compile for the simulator:\n")
    assert re.search(r"^k\.cu:2:11: error: expected ';'", message, re.M)
    message = messages_of('#include "sub/h.cuh"\n', **{"sub/h.cuh": "\nwhat;\n"})
    assert re.search(r"^sub/h\.cuh:2:\d+: error: ", message, re.M)


def test_other_mistakes():
    assert re.search(r"k\.cu:1:10: fatal error: .*nosuch\.h", messages_of("#include <nosuch.h>\n"))
    lost = messages_of("__device__ int f(int);\n" + KERNEL % "x[0] = f(3);")
    assert re.search(r"\nk\.cu(:3)?: f\(int\) is declared and used, and defined nowhere", lost)


@pytest.mark.parametrize("name", ["__activemask()", "(__nv_fp8_e4m3)1.0f"])
def test_names_of_cudas_that_are_missing_are_named(name):
    word = re.search(r"__\w+", name)[0]
    with pytest.raises(Unsupported, match=rf"k.cu:2: {word} is not known to the simulator"):
        build({"k.cu": KERNEL % f"x[0] = (float){name};"}, "k.cu")


@pytest.mark.parametrize("kind", toolchain.KINDS)
def test_shared_variables_are_where_the_library_says(kind):
    built = build({"k.cu": DECLARES, "more.cuh": MORE}, "k.cu", {}, kind)
    assert built.kind == kind and list(built.kernels) == ["plain", "hidden", "k"]
    found = {(v.name, v.function): (v.type, v.shape) for v in built.shared}
    if kind == "watched":  # elsewhere the compiler keeps in registers what it can
        assert found == SHARED and [v.name for v in built.shared].count("part") == 5
    assert found.items() <= SHARED.items() and [v.name for v in built.shared if v.dynamic] == ["buffer"]
    ends = [(v.offset, v.offset + v.size) for v in built.shared]
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:])) and ends[-1][0] % 1024 == 0


def _span(built, name):
    """First and last address of a function."""
    for line in subprocess.run(["nm", "-S", built.path], capture_output=True, text=True).stdout.splitlines():
        if line.split()[-1] == name:
            start, size = (int(word, 16) for word in line.split()[:2])
            return start, start + size
    raise KeyError(name)


@pytest.mark.parametrize("kind", ["fast", "watched"])
def test_addresses_lead_back_to_lines(kind):
    header = "__device__ __forceinline__ int helper(int a) {\n    return a * a * 3;  // three\n}\n"
    text = '#include "sub dir/h.cuh"\n' + KERNEL % "    for (int i = 0; i < 3; ++i)\n        x[i] = helper((int)x[i]);"
    built = build({"k.cu": text, "sub dir/h.cuh": header}, "k.cu", {}, kind)
    start, end = _span(built, "k")
    found = built.lines(range(start + 1, end + 1))
    assert {*range(start + 1, end + 1)} <= found.keys()
    known = {line for line in found.values() if line.file != "?" and line.text}
    assert Line("k.cu", 4, "x[i] = helper((int)x[i]);", "k") in known
    assert {line.function for line in known if line.file == "k.cu"} == {"k"}
    inside = Line("h.cuh", 2, "return a * a * 3;  // three", "helper")
    if kind == "fast":
        assert inside in known
    else:
        start, end = _span(built, "_Z6helperi")
        assert inside in built.lines(range(start + 1, end)).values()
    found = built.lines([0, 2**40])
    assert found[0] == found[2**40] == Line("?", 0, "", "?")


def test_without_binutils_the_message_names_them():
    built = build({"k.cu": KERNEL % "x[0] = 1;"}, "k.cu")
    with pytest.raises(StackError, match="binutils"):
        toolchain.find_lines(lambda name: None, built.path, [1], built.sources)


def test_what_goes_in_decides_the_name_and_nothing_else_does(tiny, tmp_path, monkeypatch):
    texts = {"k.cu": '#include "h.cuh"\n__global__ void k() {}\n', "h.cuh": "// 1\n"}
    folder = tmp_path / "cache"

    def name(texts=texts, defines=None, kind="fast"):
        return build(texts, "k.cu", defines or {}, kind, cache_in=folder).path.name

    first = name()
    assert re.fullmatch(r"k-fast-[0-9a-f]{20}\.so", first) and (folder / first).is_file()
    others = [name({**texts, "h.cuh": "// 2\n"}), name(defines={"A": True}), name(defines={"A": 1})]
    monkeypatch.setitem(toolchain.KINDS, "other", ["-O1"])
    others.append(name(kind="other"))
    (tiny / "runtime.cpp").write_text("int sim_version() { return 2; }\n")
    others.append(name())
    assert len({first, *others}) == 6
    (tiny / "runtime.cpp").write_text("int sim_version() { return 1; }\n")
    (tiny / "notes.txt").write_text("not compiled")
    monkeypatch.setattr(toolchain, "_compile", lambda command, *_: pytest.fail(command))
    assert name(dict(reversed(texts.items()))) == first
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_a_build_holds_no_path_of_this_computer(tiny, tmp_path):
    texts = {"k.cu": '#include "h.cuh"\n__global__ void k() { h(); }\n', "h.cuh": "inline void h() {}\n"}
    one, two = (build(texts, "k.cu", cache_in=tmp_path / name).path.read_bytes() for name in ("one", "another one"))
    assert one == two and os.fsencode(tmp_path) not in one


def test_a_folder_that_cannot_be_written_is_named(tiny, tmp_path, monkeypatch):
    def full(a, b):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StackError, match=f"in {tmp_path} .No space left on device.*TWELL_LAB_CACHE"):
        build({"k.cu": "__global__ void k() {}\n"}, "k.cu", cache_in=tmp_path)


def test_two_threads_build_the_same_file_at_once(tiny, tmp_path):
    """As two processes do, which meet in the folder alone."""

    def made(_):
        return build({"k.cu": "__global__ void k() {}\n"}, "k.cu", cache_in=tmp_path / "cache").path

    with ThreadPoolExecutor(2) as pool:
        (path,) = set(pool.map(made, range(2)))
    assert path.name.endswith(".so") and not [path for path in path.parent.iterdir() if path.is_dir()]
