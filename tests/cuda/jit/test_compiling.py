"""Calls of the real compiler: its options, its messages, and what is cached. Needs no GPU."""

import pytest

from twell_lab import core
from twell_lab.core import CompileError, StackError
from twell_lab.cuda import cubins as jit

try:
    jit.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)


def test_a_real_cubin_is_cached_whole(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CUBINS", raising=False)
    made = jit.compile("smxx_pack.cu", "sm_75", {"VALUE_BF16": True}, cache_in=tmp_path)
    monkeypatch.setattr(jit, "_run_nvrtc", lambda *_: pytest.fail("compiled again"))
    again = jit.compile("smxx_pack.cu", "sm_75", {"VALUE_BF16": True}, cache_in=tmp_path)
    assert again == made and "pack_v4" in jit.resources(again.log)


@pytest.mark.parametrize(
    "source, told",
    [
        ('extern "C" __global__ void k() { int x = ; }', "expected an expression"),
        ('extern "C" __global__ void k() { undeclared(); }', "undeclared"),
        ("#include <no_such_header.h>\n", "no_such_header"),
        ('#if !defined(VALUE_BF16)\n#error "define one"\n#endif\n', "define one"),
    ],
    ids=["syntax", "name", "header", "#error"],
)
def test_a_source_that_does_not_compile_comes_with_the_compilers_log(source, told, tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text(source)
    monkeypatch.setattr(core, "kernels_dir", lambda: tmp_path)
    with pytest.raises(CompileError, match=rf"(?s)broken\.cu for sm_90.*{told}"):
        jit.compile("broken.cu", "sm_90", {}, cache_in=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_macros_reach_the_source(tmp_path, monkeypatch):
    (tmp_path / "k.cu").write_text(
        '#if N != 3 || !defined(FLAG)\n#error "not so"\n#endif\nextern "C" __global__ void k() {}\n'
    )
    monkeypatch.setattr(core, "kernels_dir", lambda: tmp_path)
    assert "k" in jit.resources(jit.compile("k.cu", "sm_75", {"N": 3, "FLAG": True}, cache_in=tmp_path / "c").log)
    with pytest.raises(CompileError, match="not so"):
        jit.compile("k.cu", "sm_75", {"N": 4, "FLAG": True}, cache_in=tmp_path / "c")


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(CompileError, match="smxx_pack.cu for sm_999"):
        jit.compile("smxx_pack.cu", "sm_999", {"VALUE_BF16": True}, cache_in=tmp_path)


def test_this_compiler_knows_every_architecture():
    assert jit.compiler() >= (12, 8)
    for name in jit.ARCHITECTURES:
        number = int(name.removeprefix("sm_"))
        assert jit.architecture((number // 10, number % 10), "smxx_pack.cu") == name
