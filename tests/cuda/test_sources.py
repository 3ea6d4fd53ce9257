"""What is read out of a kernel's source: tokens, numbers, entries; beside a real preprocessor where there is one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab import core, simulator
from twell_lab.core import CompileError
from twell_lab.cuda import registry, sources

words = st.sampled_from(
    ["a", "b1", "0x1f", "1.5e-3f", '"s // t"', "'c'", "->", "<<=", "++", "+", "(", ")", "{", "}", ";", "<", ">", "::"]
)
gaps = st.sampled_from([" ", "\n", "\t", "  // note\n", " /* a */ ", "\\\n ", "\n\n"])


@settings(max_examples=150, deadline=None)
@given(st.lists(words, max_size=30), st.data())
def test_only_the_tokens_of_cuda_matter(tokens, data):
    def spelled():
        return "".join(word + data.draw(gaps) for word in tokens)

    assert sources.tokens(spelled()) == sources.tokens(spelled()) == tuple(tokens)


HEADER = """#pragma once
#ifndef WIDE
#define WIDE 4  // of it
#endif
#if defined(VALUE_FP32)
typedef float value_t;
#elif defined(VALUE_BF16) || defined(VALUE_FP16)
typedef unsigned short value_t;
#else
#error "define one"
#endif
#define VECTOR (16 / (int)sizeof(value_t))
"""
SOURCE = """// A kernel.
#include "head.cuh"
#include <cuda_fp16.h>
#include "head.cuh"
#define LANES (WIDE * 32u)
#define PAIR(a, b) a##_##b
#define TWICE(NAME, MORE) extern "C" __global__ void __launch_bounds__(LANES, MORE) NAME(PARAMETERS) { int i[2] = {}; }
#define PARAMETERS const value_t* __restrict__ x, long long n
#define CHOICE (WIDE > 4 ? WIDE == 8 ? 80 : 50 : 40)
#define WORDS "no number"
#define ITSELF (ITSELF + 1)
struct Both { value_t* a; float* b; };
template <int N> __device__ int helper(int (&v)[N]) { return v[0]; }
#if WIDE > 4 && !(defined(LEFT_OUT))
#define ONLY 1
TWICE(PAIR(made, v2), 3)
#else
extern "C" __global__ void __cluster_dims__(WIDE > 1 ? 2 : 1, 1, 1) plain(Both both, unsigned n[2]) {}
#endif
extern "C" __global__ void declared(int);
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "head.cuh").write_text(HEADER)
    (tmp_path / "k.cu").write_text(SOURCE)
    monkeypatch.setattr(core, "kernels_dir", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name, macros, value",
    [
        ("WIDE", {}, 4),
        ("WIDE", {"WIDE": 9}, 9),
        ("LANES", {"WIDE": 2}, 64),
        ("VECTOR", {}, 8),
        ("VECTOR", {"VALUE_FP32": True}, 4),
        ("CHOICE", {}, 40),
        ("CHOICE", {"WIDE": 8}, 80),
        ("CHOICE", {"WIDE": 5}, 50),
        ("ONLY", {"WIDE": 5}, 1),
        ("VALUE_BF16", {"VALUE_BF16": True}, 1),
    ],
)
def test_numbers_are_those_of_a_preprocessor(kernels, name, macros, value):
    assert sources.number("k.cu", name, macros) == sources.number("k.cu", name, tuple(macros.items())) == value


@pytest.mark.parametrize("name", ["NOT_THERE", "ONLY", "WORDS", "PAIR", "ITSELF", "PARAMETERS"])
def test_what_is_no_number_is_named(kernels, name):
    with pytest.raises(CompileError, match=f"k.cu has no macro {name}|{name} of k.cu is no whole number"):
        sources.number("k.cu", name)


def test_a_source_that_changed_is_read_again(kernels):
    assert sources.number("k.cu", "WIDE") == 4
    (kernels / "head.cuh").write_text(HEADER.replace("WIDE 4", "WIDE 6"))
    assert sources.number("k.cu", "LANES") == 192


def test_entries_with_their_arguments_and_blocks(kernels):
    ((name, made),) = sources.entries("k.cu", {"VALUE_FP32": True, "WIDE": 5}).items()
    assert (name, made.name, made.threads, made.resident) == ("made_v2", "made_v2", 160, 3)
    assert [(p.type, p.name, p.pointer) for p in made.parameters] == [("float", "x", True), ("long long", "n", False)]
    ((name, made),) = sources.entries("k.cu", {"WIDE": 5, "LEFT_OUT": True, "VALUE_BF16": True}).items()
    assert (name, made.threads, made.resident) == ("plain", 1024, 1)  # what a GPU takes, where nothing is said
    assert [(p.type, p.name, p.pointer) for p in made.parameters] == [("Both", "both", False), ("unsigned", "n", True)]


def test_a_source_that_cannot_be_read_is_named(kernels):
    with pytest.raises(CompileError, match="no kernel source other.cu"):
        sources.entries("other.cu")
    (kernels / "k.cu").write_text('#include "lost.cuh"\n')
    with pytest.raises(CompileError, match="no kernel source lost.cuh"):
        sources.number("k.cu", "WIDE")


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", [name for name, kernel in registry.KERNELS.items() if kernel.simulated])
def test_the_entries_of_this_tree_are_what_a_compiler_finds(name):
    found = [defines for kernel, defines in registry.usual_builds() if kernel.name == name]
    assert found
    for defines in found[:4]:
        ours = registry.KERNELS[name].entries(defines)
        theirs = simulator.compile(f"{name}.cu", dict(defines)).kernels
        assert {entry: each.parameters for entry, each in ours.items()} == {
            entry: each.parameters for entry, each in theirs.items()
        }
