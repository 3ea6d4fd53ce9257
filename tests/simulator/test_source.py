"""Reading CUDA sources: their headers, watches, what the preprocessed text declares, and what no CPU can run."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulator.declarations import DECLARES, KERNEL, MORE
from twell_lab.core import CompileError, InputError
from twell_lab.simulator import source, toolchain
from twell_lab.simulator.faults import Unsupported
from twell_lab.simulator.source import Parameter, with_watches
from twell_lab.simulator.toolchain import listing, sources

if not toolchain.available():
    pytest.skip("the simulator needs g++ on Linux", allow_module_level=True)


@pytest.fixture
def own(tmp_path):
    """A folder for one's own files; its path has a space."""
    folder = tmp_path / "my kernels"
    folder.mkdir()
    return folder


def declared(text, defines=None, **headers):
    return listing({"k.cu": text, **headers}, "k.cu", defines or {})


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
    assert " ".join(found) == (
        "k.cu row_walk.cuh activation.cuh twell.cuh sub/a.cuh sub/b.cuh ../common/c.cuh ../common/d.cuh"
    )
    assert "mine" in found["twell.cuh"] and "\r" not in found["twell.cuh"] and "beside a" in found["sub/b.cuh"]
    assert sources(str(own / "k.cu")) == found


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
    values = {"k.cu:1": "a", "3": "a * (2 + 1)", "k.cu:for (int i": "i", "h.cuh:y = 2;": " y ", "1": "a / 2"}
    values |= {"k.cu:7": 'f("//")', "b = a;": "b"}
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
    ("place", "message"),
    [
        ("k.cu:8", r"line 8 ends in ','; .* follows a ; or \{"),
        ("k.cu:10", r"ends in '\\\\'"),
        ("k.cu:6", r"ends in '}'"),
        ("k.cu:13", "no line of k.cu, which has 12"),
        ("h.cuh:x = 1;", "lines 1, 3 of h.cuh"),
        ("h.cuh:z", "no line of h.cuh"),
        ("other.cuh:3", "no line of k.cu.*in k.cu, h.cuh"),
    ],
)
def test_a_watch_that_cannot_be_put_is_refused(place, message):
    with pytest.raises(InputError, match=message):
        with_watches(WATCHED, {place: "a"})


@given(st.text(alphabet="ab/*\"'\\\n R(", max_size=60))
def test_without_comments_everything_stays_in_its_place(text):
    for strings in (True, False):
        code = source.code_only(text, strings)
        assert len(code) == len(text) and [c == "\n" for c in code] == [c == "\n" for c in text]
        assert all(c == " " or c == old for c, old in zip(code, text, strict=True))
    if not set(text) & set("/\"'"):
        assert code == text


def test_kernels_and_their_parameters_are_listed():
    found = declared(DECLARES, **{"more.cuh": MORE}).kernels
    assert list(found) == ["plain", "hidden", "k"]
    assert found["k"] == (Parameter("float", "x", True), Parameter("int", "n", False))
    assert found["hidden"] == ()
    assert found["plain"] == (
        Parameter("unsigned long long", "w", True, True),
        Parameter("Pair", "p", False),
        Parameter("unsigned char", "", False),
        Parameter("float", "v", True),
        Parameter("long long", "n", False),
        Parameter("unsigned long long", "u", True),
        Parameter("float2", "q", True),
    )


def test_the_macros_decide_what_is_there():
    text = "#ifdef BIG\n__global__ void big() {}\n#else\n__global__ void small() { __shared__ int a[N * 2]; }\n#endif\n"
    assert list(declared(text, {"BIG": True}).kernels) == ["big"]
    assert declared(text, {"N": 21}).variables[0].shape == (42,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KERNEL % 'asm volatile("{\\n.reg .b32 r;\\nwgmma.mma_async.sync;\\n}");', r"k.cu:2: wgmma\.mma_async.*tensor"),
        (KERNEL % 'asm("cp.async.bulk.tensor.2d [%0];"\n  :: "r"(1));', r"cp\.async\.bulk\.tensor\.2d .*accelerator"),
        ('#define L(x) asm("ldmatrix.sync.x4 %0;" : "=r"(x))\n' + KERNEL % "\nL(a);", r"k.cu:4: ldmatrix\.sync\.x4"),
        (KERNEL % 'asm("@%%p mov.u32 %0, %%laneid;" : "=r"(a) : "memory");', r"k.cu:2: mov\.u32.*inline PTX"),
        ("#include <mma.h>\n", r"k.cu:1: <mma.h>"),
        ("#include <stdint.h>\n#include <cuda/barrier>\n", "k.cu:2: <cuda/barrier>"),
        ("namespace cg = cooperative_groups;\n", "cooperative groups"),
        ("__global__ void __cluster_dims__(2, 1, 1) k() {}\n", "__cluster_dims__.*cluster"),
        ("__global__ void k(const CUtensorMap map) {}\n", "CUtensorMap"),
        ("__global__ void k() {}\nint main() {\n  k<<<1, 2>>>();\n}\n", "k.cu:3: <<<.*from Python"),
    ],
)
def test_what_only_a_gpu_can_do_is_named_with_its_line(text, message):
    with pytest.raises(Unsupported, match=message):
        declared(text)


def test_inactive_code_comments_and_empty_assembly_are_no_reason_to_refuse():
    text = '#if N > 2\n#include <mma.h>\nasm("wgmma.fence");\n#endif\n// k<<<1, 2>>>();\nconst char* s = "<<<";\n'
    listing({"k.cu": text + KERNEL % 'asm volatile("" ::: "memory");'}, "k.cu", {"N": 1})
    with pytest.raises(Unsupported):
        listing({"k.cu": text}, "k.cu", {"N": 3})
