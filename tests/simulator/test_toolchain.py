"""From a .cu file to a library: sources, watches, what the preprocessor tells, builds, their cache, and source lines."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell_lab import paths
from twell_lab.errors import CompileError, InputError, StackError
from twell_lab.simulator import source, toolchain
from twell_lab.simulator.faults import Unsupported
from twell_lab.simulator.toolchain import Line, Parameter, build, listing, refuse, sources, with_watches

if not toolchain.available():
    pytest.skip("the simulator needs g++ or clang++ on Linux", allow_module_level=True)

COMPILERS = [name for name in ("g++", "clang++") if toolchain._try(shutil.which(name) or name)]
KERNEL = 'extern "C" __global__ void k(float* x) {\n%s\n}\n'


@pytest.fixture(params=COMPILERS or ["c++"])
def cxx(request, monkeypatch):
    """Each compiler in turn."""
    monkeypatch.setenv("TWELL_LAB_CXX", request.param)
    return request.param


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for the file, so that the runtime is compiled once for each compiler; its path has a space."""
    return tmp_path_factory.mktemp("one cache")


@pytest.fixture
def own(tmp_path):
    """A folder for one's own files; its path has a space."""
    folder = tmp_path / "my kernels"
    folder.mkdir()
    return folder


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


def declared(text, defines={}, **headers):
    return listing({"k.cu": text, **headers}, "k.cu", defines)


def not_to_be_compiled(monkeypatch):
    def compile(command, *_):
        raise AssertionError(command)

    monkeypatch.setattr(toolchain, "_compile", compile)


# ---- the compiler


def test_the_compiler_says_who_it_is(cxx):
    found = toolchain.compiler()
    assert found.name == cxx and Path(found.path).is_absolute() and re.search(r"\d+\.\d+", found.version)


@pytest.mark.parametrize("named", ["no-such-compiler", "true", "/nowhere/g++", "."])
def test_a_named_compiler_that_does_not_work_is_an_error_that_says_what_to_install(named, monkeypatch):
    monkeypatch.setenv("TWELL_LAB_CXX", named)
    with pytest.raises(StackError, match=r"apt install g\+\+.*dnf install gcc-c\+\+.*conda-forge gxx") as caught:
        toolchain.compiler()
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert not toolchain.available()


def test_a_compiler_that_does_not_work_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CXX", raising=False)
    real = toolchain.compiler().path
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "clang++").write_text(f'#!/bin/sh\nexec "{real}" "$@"\n')
    for script in tmp_path.iterdir():
        script.chmod(0o755)
    tools = os.pathsep.join([str(tmp_path), "/nowhere"])
    assert toolchain._compiler("", tools).path == str(tmp_path / "clang++")


def test_an_empty_path_has_no_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StackError, match="needs a C"):
        toolchain.compiler()


@pytest.mark.parametrize(("platform", "machine"), [("win32", "x86_64"), ("darwin", "arm64"), ("linux", "riscv64")])
def test_other_systems_are_told_where_it_runs(platform, machine, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    with pytest.raises(StackError, match="WSL 2"):
        toolchain.compiler()
    assert not toolchain.available()


# ---- sources


def test_a_name_is_a_file_of_kernels_with_its_headers():
    found = sources("smxx_gated.cu")
    assert list(found)[0] == "smxx_gated.cu"
    assert set(found) == {"smxx_gated.cu", "dense_row.cuh", "row_walk.cuh", "twell.cuh"}
    assert found["twell.cuh"] == (paths.kernels_dir() / "twell.cuh").read_text()


def test_own_headers_come_before_those_of_kernels(own):
    (own / "k.cu").write_text(
        '#include "row_walk.cuh"\n#include "sub/a.cuh"\n#include "cuda_fp16.h"\n//#include "gone.h"\n', "utf-8"
    )
    (own / "twell.cuh").write_text("#pragma once\n// mine\r\n")
    (own / "sub").mkdir()
    (own / "sub" / "a.cuh").write_text('#include "b.cuh"\n#include "twell.cuh"\n#include "../../common/c.cuh"\n')
    (own / "sub" / "b.cuh").write_text("// beside a\n")
    (own / "b.cuh").write_text("// not beside a\n")
    (own.parent / "common").mkdir()
    (own.parent / "common" / "c.cuh").write_text('#include "d.cuh"\n')
    (own.parent / "common" / "d.cuh").write_text("// d\n")
    found = sources(own / "k.cu")
    assert list(found) == ["k.cu", "row_walk.cuh", "twell.cuh", "sub/a.cuh", "sub/b.cuh", "../common/c.cuh", "../common/d.cuh"]
    assert "mine" in found["twell.cuh"] and "\r" not in found["twell.cuh"] and "beside a" in found["sub/b.cuh"]
    assert sources(str(own / "k.cu")) == found
    assert sources("sub/b.cuh", own) == {"b.cuh": "// beside a\n"}


def test_a_missing_file_is_named_with_the_folder(own):
    with pytest.raises(CompileError, match=r"nosuch\.cu in .*kernels cannot be read: No such file"):
        sources("nosuch.cu")
    (own / "k.cu").write_text('#include "outer.h"\n')
    (own / "outer.h").write_text('#include "gone.h"\n')
    with pytest.raises(CompileError, match=f'outer.h includes "gone.h".* neither in {own} nor in .*kernels'):
        sources(own / "k.cu")
    (own / "k.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CompileError, match="k.cu in .* UTF-8"):
        sources(own / "k.cu")


# ---- watches

WATCHED = {
    "k.cu": "int a = 1;  // a: one\n"  # 1
    "for (int i = 0; i < 3; ++i) {\n"  # 2
    "    a += i; /* more */ // and more\n"  # 3
    "    if (a) b();\n"  # 4
    "    else c();\n"  # 5
    "}\n"  # 6
    'f("; // no comment");\n'  # 7
    "g(a,\n"  # 8
    "\n"  # 9
    "#define M x; \\\n"  # 10
    "// b = a;\n"  # 11
    "    b = a;",  # 12
    "h.cuh": "x = 1;\n\ty =  2;\nx = 1;\n",
}


def test_watches_follow_their_lines_and_leave_the_numbers_alone():
    values = {"k.cu:1": "a", "3": "a * (2 + 1)", "k.cu:for (int i": "i", "h.cuh:y = 2;": " y ", "1": "a / 2",
              "k.cu:7": "f(\"//\")", "b = a;": "b"}  # fmt: skip
    found, names = with_watches(WATCHED, values)
    assert names == ("a", "a * (2 + 1)", "i", "y", "a / 2", 'f("//")', "b")
    lines = found["k.cu"].split("\n")
    assert lines[0] == "int a = 1; sim_watch(0, (a)); sim_watch(4, (a / 2));  // a: one"
    assert lines[1] == "for (int i = 0; i < 3; ++i) { sim_watch(2, (i));"
    assert lines[2] == "    a += i; sim_watch(1, (a * (2 + 1))); /* more */ // and more"
    assert lines[6] == 'f("; // no comment"); sim_watch(5, (f("//")));'
    assert lines[11] == "    b = a; sim_watch(6, (b));"
    assert found["h.cuh"] == "x = 1;\n\ty =  2; sim_watch(3, (y));\nx = 1;\n"
    for name, text in WATCHED.items():
        assert re.sub(r" sim_watch\(\d+, \(.*?\)\);(?=  //| /\*| sim|\n|$)", "", found[name]) == text
    assert with_watches(WATCHED, {}) == (WATCHED, ())


@pytest.mark.parametrize(
    ("place", "expression", "message"),
    [
        ("k.cu:8", "a", r"line 8 ends in ','; .* ends in ; or \{"),
        ("k.cu:9", "a", "ends in 'nothing'"),
        ("k.cu:10", "a", r"ends in '\\\\'"),
        ("k.cu:11", "a", "ends in 'nothing'"),
        ("k.cu:6", "a", r"ends in '}'"),
        ("k.cu:4", "a", "an else follows line 4"),
        ("k.cu:13", "a", "k.cu has lines 1 to 12"),
        ("0", "a", "lines 1 to 12"),
        ("h.cuh:x = 1;", "x", "lines 1, 3 have this text in h.cuh"),
        ("h.cuh:z", "x", "no line has this text in h.cuh"),
        ("k.cu:", "x", "no line has this text"),
        ("other.cuh:3", "x", "names 'other.cuh'; the sources are k.cu, h.cuh"),
        ("k.cu:1", "", "is no expression"),
        ("k.cu:1", "a;", "is no expression"),
        ("k.cu:1", "a // b", "is no expression"),
        ("k.cu:1", "a\nb", "is no expression"),
        ("k.cu:1", 3, "is no expression"),
    ],
)
def test_a_watch_that_cannot_be_put_is_refused(place, expression, message):
    with pytest.raises(InputError, match=message):
        with_watches(WATCHED, {place: expression})


# ---- reading the text


@given(st.text(alphabet="ab/*\"'\\\n R(", max_size=60))
def test_without_comments_everything_stays_in_its_place(text):
    for strings in (True, False):
        code = source.code_only(text, strings)
        assert len(code) == len(text) and [c == "\n" for c in code] == [c == "\n" for c in text]
        assert all(c == " " or c == old for c, old in zip(code, text, strict=True))
    if not set(text) & set("/\"'"):
        assert code == text


_numbers = st.integers(0, 99).map(lambda n: (str(n), n))


def _combined(children):
    def join(parts):
        (a, x), op, (b, y) = parts
        if op in "/%" and (y <= 0 or x < 0):
            op = "+"
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x // max(y, 1), "%": x % max(y, 1)}[op]
        return f"((int){a} {op} {b})", value

    return st.tuples(children, st.sampled_from("+-*/%"), children).map(join)


@given(st.recursive(_numbers, _combined, max_leaves=6))
def test_extents_are_evaluated(expression):
    text, value = expression
    types = source.Types(source.OwnText("", ()))
    assert types.integer(text) == (value if 0 <= value < 2**40 else -1)


@pytest.mark.parametrize("text", ["f(2)", "N", "2 +", "__import__('os')", "1 << 99", "1 / 0", "9 ** 9", "1.5", "-3", "'a'"])
def test_what_is_no_plain_integer_is_left_open(text):
    assert source.Types(source.OwnText("", ())).integer(text) == -1


DECLARES = """
#include "more.cuh"
#define PAD 1
const int ROWS = 4;
constexpr unsigned COLS = ROWS * 8u;
typedef float real; using word = unsigned long long int; typedef const word* words_t;
struct Pair { int a; float b; };
template <int N> __device__ float f(float v) { __shared__ real t[N][2]; t[0][0] = v; return t[N - 1][1]; }
namespace inner { __device__ int g() { __shared__ int part; part = 1; return part; } }
struct S { __device__ int h() { __shared__ short part[2 * sizeof(real)], q[3]; part[0] = q[0]; return part[0]; } };
__shared__ double whole[3];
static __device__ int same(int a) { __shared__ int part[7]; part[0] = a; return part[a]; }
template <class T> __global__ void generic(T* x) { x[0] = 0; }
static __global__ void __launch_bounds__(32)
plain(const word* __restrict__ w, const Pair p, unsigned char, real v[3], long long int n, words_t u, float2* const q) {}
__global__ void later(int);
namespace inner { __global__ void hidden(void) {} }
#if PAD == 2
__global__ void inactive() {}
#endif
#define KERNEL(NAME) extern "C" __global__ void NAME(float* x, int n = ROWS) { \\
    __shared__ int part[2]; part[0] = n; x[2] = part[0]; \\
    { __shared__ int part[2]; part[1] = n; x[3] = part[1]; } \\
    extern __shared__ float buffer[]; \\
    __shared__ real tile[ROWS][COLS + PAD]; \\
    __shared__ Pair pairs[5]; \\
    __shared__ float4 four[(1 << 2) / 2]; \\
    float __shared__ odd[2]; \\
    tile[0][0] = odd[0]; pairs[0].a = 1; four[0].x = 2; buffer[threadIdx.x] = f<6>(1) + f<3>(2) + more(1); \\
    S s; x[1] = buffer[0] + inner::g() + s.h() + same(2) + whole[0]; \\
}
KERNEL(k)
"""
MORE = "inline __device__ int more(int a) {\n    __shared__ int beside; // __shared__ int no;\n    return beside = a;\n}\n"
# name, function -> type, shape
SHARED = {
    ("part", "inner::g"): ("int", ()), ("whole", ""): ("double", (3,)), ("part", "same"): ("int", (7,)),
    ("tile", "k"): ("float", (4, 33)), ("pairs", "k"): ("Pair", (5,)), ("four", "k"): ("float4", (2,)),
    ("odd", "k"): ("float", (2,)), ("part", "k"): ("int", (2,)), ("part", "S::h"): ("short", (8,)),
    ("q", "S::h"): ("short", (3,)), ("t", "f<6>"): ("float", (6, 2)), ("t", "f<3>"): ("float", (3, 2)),
    ("beside", "more"): ("int", ()), ("buffer", ""): ("float", (toolchain.MOST_SHARED // 4,)),
}  # fmt: skip


def test_kernels_and_their_parameters_are_listed(cxx):
    found = declared(DECLARES, **{"more.cuh": MORE}).kernels
    assert list(found) == ["plain", "hidden", "k"]
    assert found["k"].parameters == (Parameter("float", "x", True), Parameter("int", "n", False))
    assert found["hidden"].parameters == ()
    assert found["plain"].parameters == (
        Parameter("unsigned long long", "w", True), Parameter("Pair", "p", False), Parameter("unsigned char", "", False),
        Parameter("float", "v", True), Parameter("long long", "n", False), Parameter("unsigned long long", "u", True),
        Parameter("float2", "q", True),
    )  # fmt: skip


def test_shared_variables_are_listed_with_their_lines(cxx):
    found = declared(DECLARES, **{"more.cuh": MORE}).shared
    by_name = {(d.name, d.function): (d.type, d.shape) for d in found}
    assert by_name["tile", "k"] == ("float", (4, 33)) and by_name["buffer", "k"] == ("float", None)
    assert by_name["t", "f"] == ("float", (-1, 2)) and by_name["part", "h"] == ("short", (8,))
    lines = {d.name: (d.file, d.line) for d in found}
    assert lines["beside"] == ("more.cuh", 2) and lines["whole"] == ("k.cu", 11)


def test_the_macros_decide_what_is_there():
    text = "#ifdef BIG\n__global__ void big() {}\n#else\n__global__ void small() { __shared__ int a[N * 2]; }\n#endif\n"
    assert list(declared(text, {"BIG": True}).kernels) == ["big"]
    assert declared(text, {"N": 21}).shared[0].shape == (42,)


# ---- what cannot run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KERNEL % 'asm volatile("{\\n.reg .b32 r;\\nwgmma.mma_async.sync.aligned.m64n8k16;\\n}");', r"k.cu:2: wgmma\.mma_async.*tensor-core"),
        (KERNEL % 'asm("cp.async.bulk.tensor.2d [%0];"\n  :: "r"(1));', r"k.cu:2: cp\.async\.bulk\.tensor\.2d .*tensor memory acc"),
        (KERNEL % 'asm("cp.async.cg.shared.global [%0], [%1], 16;");', r"cp\.async\.cg.*background"),
        (KERNEL % '__asm__ __volatile__ ("mma.sync.aligned.m16n8k16.row.col.f32");', r"mma\.sync"),
        ('#define LDM(x) asm("ldmatrix.sync.x4 %0;" : "=r"(x))\n' + KERNEL % "int a;\nLDM(a);", r"k.cu:4: ldmatrix\.sync\.x4"),
        (KERNEL % 'asm("@%%p mov.u32 %0, %%laneid;" : "=r"(a) : "memory");', r"k.cu:2: mov\.u32.*inline PTX"),
        ("#include <mma.h>\n", r"k.cu:1: <mma.h>"),
        ("#include <stdint.h>\n#include <cuda/barrier>\n", "k.cu:2: <cuda/barrier>"),
        ('#include "cooperative_groups.h"\n', "k.cu:1: <cooperative_groups.h>"),
        ("namespace cg = cooperative_groups;\n", "cooperative groups"),
        ("__global__ void __cluster_dims__(2, 1, 1) k() {}\n", "__cluster_dims__.*cluster"),
        ("__global__ void k(const CUtensorMap map) {}\n", "CUtensorMap"),
        ("__global__ void k() {}\nint main() {\n  k<<<1, 2>>>();\n}\n", "k.cu:3: <<<.*from Python"),
    ],
)  # fmt: skip
def test_what_only_a_gpu_can_do_is_named_with_its_line(text, message, cxx):
    with pytest.raises(Unsupported, match=message):
        refuse({"k.cu": text}, "k.cu")
    with pytest.raises(Unsupported, match=message):
        declared(text)


def test_inactive_code_comments_and_empty_assembly_are_no_reason_to_refuse():
    text = '#if N > 2\n#include <mma.h>\nasm("wgmma.fence");\n#endif\n// k<<<1, 2>>>();\nconst char* s = "<<<";\n'
    refuse({"k.cu": text + KERNEL % 'asm volatile("" ::: "memory");'}, "k.cu", {"N": 1})
    with pytest.raises(Unsupported):
        refuse({"k.cu": text}, "k.cu", {"N": 3})
    with pytest.raises(InputError, match="'other.cu' is none of the sources: k.cu"):
        refuse({"k.cu": text}, "other.cu")


@pytest.mark.parametrize("name", ["__activemask()", "__some_new_intrinsic(x[0], 3)", "(__nv_fp8_e4m3)1.0f", "__nv_what<int>()"])
def test_names_of_cudas_that_are_missing_are_named(name, cxx, cache):
    word = re.search(r"__\w+", name)[0]
    with pytest.raises(Unsupported, match=rf"k.cu:2: {word} is not known to the simulator"):
        build({"k.cu": KERNEL % f"x[0] = (float){name};"}, "k.cu", cache_in=cache)


# ---- messages of the compiler


def messages_of(text, cache, **headers):
    with pytest.raises(CompileError) as caught:
        build({"k.cu": text, **headers}, "k.cu", cache_in=cache)
    message = str(caught.value)
    assert str(cache) not in message and "/tmp" not in message and "sim_unit" not in message
    assert len(message.splitlines()) <= 22
    return message


def test_a_syntax_error_reads_as_the_compiler_said_it(cxx, cache):
    message = messages_of(KERNEL % "  x[0] = 1\n  x[1] = 2;", cache)
    assert message.startswith("k.cu does not compile for the simulator:\n")
    assert re.search(r"^k\.cu:2:11: error: expected ';'", message, re.M)
    assert re.search(r"^sub/h\.cuh:2:\d+: error: ", messages_of('#include "sub/h.cuh"\n', cache, **{"sub/h.cuh": "\nwhat;\n"}), re.M)


def test_many_errors_are_cut_short(cxx, cache):
    errors = "\n".join(f"#error number {i}\n" for i in range(60))
    assert "number 0" in messages_of(errors, cache)


def test_other_mistakes(cxx, cache):
    assert re.search(r"k\.cu:1:10: fatal error: .*nosuch\.h", messages_of("#include <nosuch.h>\n", cache))
    lost = messages_of("__device__ int f(int);\n" + KERNEL % "x[0] = f(3);", cache)
    assert re.search(r"\nk\.cu(:3)?: f\(int\) is declared and used, and defined nowhere", lost)
    with pytest.raises(InputError, match="kind is 'quick'; accepted are fast, watched, address"):
        build({"k.cu": ""}, "k.cu", {}, "quick", cache_in=cache)


# ---- what is built


@pytest.mark.parametrize("kind", toolchain.KINDS)
def test_shared_variables_are_where_the_library_says(kind, cxx, cache):
    built = build({"k.cu": DECLARES, "more.cuh": MORE}, "k.cu", {}, kind, cache_in=cache)
    assert built.kind == kind and list(built.kernels) == ["plain", "hidden", "k"] and built.dynamic == ("buffer",)
    found = {(v.name, v.function): (v.type, v.shape) for v in built.shared}
    if kind == "watched":  # elsewhere the compiler keeps in registers what it can
        assert found == SHARED and [v.name for v in built.shared].count("part") == 5
    assert found.items() <= SHARED.items() and [v.name for v in built.shared if v.dynamic] == ["buffer"]
    ends = [(v.offset, v.offset + v.size) for v in built.shared]
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:])) and ends[-1][0] % 1024 == 0


def test_the_addresses_of_shared_variables_are_their_offsets(cxx, cache):
    text = """
    extern __shared__ double buffer[];
    __global__ void k(long long* at) {
        __shared__ char a[3], c[100];
        __shared__ float b[2][5];
        at[0] = (long long)a, at[1] = (long long)b, at[2] = (long long)c, at[3] = (long long)buffer;
    }"""
    built = build({"k.cu": text}, "k.cu", cache_in=cache)
    library = ctypes.CDLL(str(built.path))
    at = (ctypes.c_longlong * 4)()
    argument = ctypes.c_void_p(ctypes.addressof(at))
    library.sim_call_k((ctypes.c_void_p * 1)(ctypes.addressof(argument)))
    place = {v.name: v.offset for v in built.shared}
    assert [x - at[0] for x in at] == [place[name] - place["a"] for name in ("a", "b", "c", "buffer")]
    assert at[3] % 1024 == 0


def _span(built, name):
    """First and last address of a function."""
    for line in subprocess.run(["nm", "-S", built.path], capture_output=True, text=True).stdout.splitlines():
        if line.split()[-1] == name:
            start, size = (int(word, 16) for word in line.split()[:2])
            return start, start + size
    raise KeyError(name)


@pytest.mark.parametrize("kind", ["fast", "watched"])
def test_addresses_lead_back_to_lines(kind, cxx, cache):
    header = "__device__ __forceinline__ int helper(int a) {\n    return a * a * 3;  // three\n}\n"
    text = '#include "sub dir/h.cuh"\n' + KERNEL % "    for (int i = 0; i < 3; ++i)\n        x[i] = helper((int)x[i]);"
    built = build({"k.cu": text, "sub dir/h.cuh": header}, "k.cu", {}, kind, cache_in=cache)
    start, end = _span(built, "k")
    found = built.lines(range(start + 1, end + 1))
    assert list(found) == list(range(start + 1, end + 1))
    known = {line for line in found.values() if line.file != "?" and line.text}
    assert Line("k.cu", 4, "x[i] = helper((int)x[i]);", "k") in known
    assert {line.function for line in known if line.file == "k.cu"} == {"k"}
    inside = Line("h.cuh", 2, "return a * a * 3;  // three", "helper")
    if kind == "fast":
        assert inside in known
    else:
        start, end = _span(built, "_Z6helperi")
        assert inside in built.lines(range(start + 1, end)).values()
    assert built.lines([0, 2**40]) == dict.fromkeys([0, 2**40], Line("?", 0, "", "?"))


def test_lines_are_asked_for_once(cache, monkeypatch):
    built = build({"k.cu": KERNEL % "x[0] = 1;"}, "k.cu", {}, "watched", cache_in=cache)
    first = built.lines([_span(built, "k")[0] + 1])
    monkeypatch.setattr(toolchain, "find_lines", None)
    assert built.lines(iter(first)) == first and built.lines([]) == {}


def test_without_addr2line_llvms_is_asked(cache):
    if not (llvm := shutil.which("llvm-symbolizer")):
        pytest.skip("needs llvm-symbolizer")
    text = '#include "h.cuh"\n' + KERNEL % "x[0] = helper(x[1]);"
    built = build({"k.cu": text, "h.cuh": "inline float helper(float a) { return a / 3; }\n"}, "k.cu", cache_in=cache)
    start, end = _span(built, "k")
    asked = [2**40, *range(start + 1, end)]
    found = toolchain.find_lines(lambda *names: llvm, built.path, asked, built.sources)
    assert found[2**40].file == "?" and {x.file for x in found.values()} >= {"k.cu", "h.cuh"}
    with pytest.raises(StackError, match="binutils"):
        toolchain.find_lines(lambda *names: None, built.path, asked, built.sources)


def test_names_of_functions_are_short():
    for long, short in {
        "k": "k", "void f<4>(int, float*)": "f<4>", "team_sum(float, int&)": "team_sum",
        "RowWalk::next(Entries&)": "RowWalk::next", "(anonymous namespace)::f(int)": "f",
        "std::pair<int, float> a::g<std::pair<int, int> >(int (*)(int)) const": "a::g<std::pair<int, int> >",
        "S::operator()(int) const": "S::operator()", "unsigned int pick<unsigned int>(unsigned int)": "pick<unsigned int>",
    }.items():  # fmt: skip
        assert toolchain.find_lines.__globals__["short_name"](long) == short


# ---- the cache


def test_what_goes_in_decides_the_name_and_nothing_else_does(tiny, tmp_path, monkeypatch):
    texts = {"k.cu": '#include "h.cuh"\n__global__ void k() {}\n', "h.cuh": "// 1\n"}
    folder = tmp_path / "cache"

    def name(texts=texts, defines={}, kind="fast"):
        return build(texts, "k.cu", defines, kind, cache_in=folder).path.name

    first = name()
    assert re.fullmatch(r"k-fast-[0-9a-f]{20}\.so", first) and (folder / first).is_file()
    others = [name({**texts, "h.cuh": "// 2\n"}), name(defines={"A": True}), name(defines={"A": 1}), name(kind="address")]
    (tiny / "runtime.cpp").write_text("int sim_version() { return 2; }\n")
    others.append(name())
    assert len({first, *others}) == 6
    (tiny / "runtime.cpp").write_text("int sim_version() { return 1; }\n")
    (tiny / "notes.txt").write_text("not compiled")
    not_to_be_compiled(monkeypatch)
    assert name(dict(reversed(texts.items()))) == first
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_a_build_from_the_cache_is_the_same(cache, monkeypatch):
    texts = {"k.cu": DECLARES, "more.cuh": MORE}
    first = build(texts, "k.cu", cache_in=cache)
    not_to_be_compiled(monkeypatch)
    assert build(texts, "k.cu", cache_in=cache) == first


def test_a_build_holds_no_path_of_this_computer(cxx, tiny, tmp_path):
    texts = {"k.cu": '#include "h.cuh"\n__global__ void k() { h(); }\n', "h.cuh": "inline void h() {}\n"}
    one, two = (build(texts, "k.cu", cache_in=tmp_path / name).path.read_bytes() for name in ("one", "another one"))
    assert one == two and os.fsencode(tmp_path) not in one


@pytest.mark.parametrize("spoil", ["truncate", "other bytes", "no json", "half a json", "json of another time"])
def test_a_spoilt_entry_is_built_anew(spoil, tiny, tmp_path):
    first = build({"k.cu": "__global__ void k() {}\n"}, "k.cu", cache_in=tmp_path)
    good, about = first.path.read_bytes(), first.path.with_suffix(".json")
    if spoil == "truncate":
        first.path.write_bytes(good[:-100])
    elif spoil == "other bytes":
        first.path.write_bytes(bytes(len(good)))
    elif spoil == "no json":
        about.unlink()
    elif spoil == "half a json":
        about.write_bytes(about.read_bytes()[:-9])
    else:
        about.write_text(json.dumps({"sha256": json.loads(about.read_text())["sha256"], "kernels": {}}))
    again = build({"k.cu": "__global__ void k() {}\n"}, "k.cu", cache_in=tmp_path)
    assert again == first and first.path.read_bytes() == good
    assert list(again.kernels) == ["k"]


def test_a_spoilt_object_of_the_runtime_is_built_anew(tiny, tmp_path):
    build({"k.cu": "__global__ void k() {}\n"}, "k.cu", cache_in=tmp_path)
    (path,) = tmp_path.glob("simulator-runtime-*.o")
    path.write_bytes(path.read_bytes()[:50])
    build({"k.cu": "__global__ void k2() {}\n"}, "k.cu", cache_in=tmp_path)
    assert len(path.read_bytes()) > 50


def test_a_cache_that_cannot_be_written_costs_a_warning(tiny, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    for folder, message in ((tmp_path / "a file" / "cache", "not written"), (None, "no cache folder can be written")):
        monkeypatch.setattr(paths, "cache_dir", lambda: None)
        with pytest.warns(UserWarning, match=message) as caught:
            built = build({"k.cu": "__global__ void k() {}\n"}, "k.cu", cache_in=folder)
        assert caught[0].filename == __file__
        assert built.path.is_file() and ctypes.CDLL(str(built.path)).sim_call_k
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        not_to_be_compiled(monkeypatch)  # within this process it is kept
        assert build({"k.cu": "__global__ void k() {}\n"}, "k.cu").path == built.path


def test_two_processes_build_the_same_file_at_once(tiny, tmp_path):
    program = (
        "import sys, pathlib; from twell_lab.simulator import toolchain\n"
        "toolchain.CUDA = pathlib.Path(sys.argv[1])\n"
        "built = toolchain.build({'k.cu': '__global__ void k() {}\\n'}, 'k.cu', cache_in=pathlib.Path(sys.argv[2]))\n"
        "print(built.path.name, *built.kernels)\n"
    )
    command = [sys.executable, "-c", program, str(tiny), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate(timeout=100)[0] for process in running}
    assert len(outputs) == 1 and outputs.pop().endswith(".so k\n")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


# ---- the kernels of this repository

SIZED = {"D_MODEL": 2048, "WARPS": 2}
FEW = {"D_MODEL": 256, "WARPS": 1, "TEAMS": 8}
KERNELS = {
    ("smxx_pack.cu", "VALUE_BF16", "all"): ["pack_v1", "pack_v2", "pack_v3", "pack_v4"],
    ("smxx_down.cu", "VALUE_FP16", "few"): ["down_v1", "down_v3"],
    ("smxx_gated.cu", "VALUE_BF16", "sized"): ["gated_v1", "gated_v2", "gated_v3"],
    ("smxx_gated.cu", "VALUE_FP32", "few"): ["gated_v1", "gated_v4"],
}
ARRAYS = {
    ("smxx_down.cu", "few"): {("sum", "down_v1"): ("float", (2048,)), ("total", "store_teams_row"): ("float", (8, 32))},
    ("smxx_gated.cu", "sized"): {
        ("sum", "gated_v1"): ("float", (2048,)),
        ("part", "gated_v1"): ("float", (4,)),
        ("part", "team_sum"): ("float", (2, 1, 2)),
    },
    ("smxx_gated.cu", "few"): {
        ("sum", "gated_v1"): ("double", (2048,)),
        ("part", "gated_v1"): ("double", (4,)),
        ("total", "store_teams_row"): ("double", (8, 32)),
    },
}


@pytest.mark.parametrize(("file", "dtype", "size"), KERNELS)
def test_the_kernels_build_and_their_shared_arrays_are_found(file, dtype, size, cxx, cache):
    defines = {dtype: True, **{"all": {}, "sized": SIZED, "few": FEW}[size]}
    built = build(sources(file), file, defines, "watched", cache_in=cache)
    assert list(built.kernels) == KERNELS[file, dtype, size]
    assert {(v.name, v.function): (v.type, v.shape) for v in built.shared} == ARRAYS.get((file, size), {})
    first = built.kernels[KERNELS[file, dtype, size][0]].parameters
    assert [p.pointer for p in first][-4:] == [False] * 4 and {p.type for p in first[-3:]} == {"int"}


@pytest.mark.parametrize("kind", ["fast", "address"])
def test_the_other_kinds_build_too(kind, cache):
    assert build(sources("smxx_pack.cu"), "smxx_pack.cu", {"VALUE_FP32": True}, kind, cache_in=cache).path.is_file()
