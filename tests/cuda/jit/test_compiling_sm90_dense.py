"""The Hopper kernels that compute neurons densely, by the real compiler: registers, spills, shared memory. Needs no
GPU."""

import re

import pytest
import torch

from twell_lab.core import folders
from twell_lab.core.errors import InputError, StackError
from twell_lab.cuda import cubins
from twell_lab.ops import hopper_dense, hopper_pack

try:
    cubins.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

JOBS = [("sm90_gate_up.cu", {"GATED": 1}), ("sm90_gate_up.cu", {"GATED": 0}), ("sm90_down_rows.cu", {})]


@pytest.mark.parametrize("dtype", ["VALUE_BF16", "VALUE_FP16"])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("file, defines", JOBS, ids=lambda value: str(value))
def test_they_compile_without_spills(file, defines, cluster, dtype, tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CUBINS", raising=False)
    cubin = cubins.compile(file, "sm_90a", {dtype: True, "CLUSTER": cluster, **defines}, cache_in=tmp_path)
    ((name, used),) = cubins.resources(cubin.log).items()
    assert name == file.removeprefix("sm90_").removesuffix(".cu")
    # 168 registers at the start for each of 384 threads; the producer's warps then give some to the others.
    assert used == {"registers": 168, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0}
    assert "serializ" not in cubin.log and "warning" not in cubin.log  # ptxas says so where wgmma cannot overlap


def test_shared_memory_is_what_the_sources_lay_out():
    texts = [(folders.kernels_dir() / name).read_text() for name in ("sm90_mainloop.cuh", "sm90_rows_out.cuh")]
    names = {
        name: value for text in texts for name, value in re.findall(r"^#define (\w+) (.+?)(?:\s*//.*)?$", text, re.M)
    }

    def number(expression):
        while re.search(r"[A-Z]", expression):
            expression = re.sub(r"[A-Z][A-Z_]*", lambda m: f"({names[m[0]]})", expression)
        return eval(expression.replace("/", "//"))

    assert hopper_dense._SHARED == number("OUT_END") <= 227 * 1024
    assert number("OUT") % 1024 == 0 and number("THREADS") == hopper_pack.THREADS


def test_tensors_elsewhere_are_refused():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not hopper_dense.takes(x, x)
    with pytest.raises(InputError, match="on cpu"):
        hopper_dense.gate_up(x, x, x)
