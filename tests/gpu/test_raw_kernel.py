"""tl.kernel on a GPU: CuPy launches what the library launches, and gets the same bits."""

import re
from pathlib import Path

import pytest
import torch

import twell_lab as tl
from twell_lab.core import CompileError, DeviceError
from twell_lab.cuda.launch import run
from twell_lab.ops import kernels
from twell_lab.ops.pack import pack
from twell_lab.ops.train_rows import TRANSPOSE

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def arguments(cupy, *given):
    """Tensors as CuPy arrays over the same memory (of bits, where CuPy lacks the type); numbers as 32-bit ones."""
    bits = {2: torch.int16, 4: torch.int32}
    arrays = (t.view(bits[t.element_size()]) if isinstance(t, torch.Tensor) else t for t in given)
    return tuple(cupy.from_dlpack(t) if isinstance(t, torch.Tensor) else t for t in arrays)


@pytest.mark.parametrize("dtype, macro", [(torch.bfloat16, "VALUE_BF16"), (torch.float16, "VALUE_FP16")])
def test_pack_by_hand_gives_the_bits_of_the_library(cupy, dtype, macro):
    gate = torch.randn(67, 520, device="cuda").to(dtype)
    expected = run(pack, gate, 256, 32, 1)
    packed = torch.full_like(expected, -1)
    kernel = tl.kernel("pack_v1", **{macro: True})
    rows, items = cupy.int64(67), 67 * 3
    torch.cuda.synchronize()
    sizes = (rows, cupy.int32(520), cupy.int32(256), cupy.int32(32))
    kernel((-(-items // 128),), (128,), (*arguments(cupy, gate, packed), *sizes))
    cupy.cuda.Device().synchronize()
    used = torch.arange(32, device="cuda") <= expected[..., :1]
    assert torch.equal(packed[used], expected[used]) and (packed[~used] == -1).all()


def test_the_lines_of_the_librarys_page_run(cupy):
    page = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(import cupy\n.*?)```", page, re.S)
    names = {"tl": tl}
    exec(compile(lines, "library.md", "exec"), names)
    cupy.cuda.Device().synchronize()
    words, out = (torch.from_dlpack(names[name]) for name in ("words", "out"))
    used = torch.arange(32, device="cuda") <= words[..., :1]
    assert words.shape == (64, 22, 32) and torch.equal(out[used], words[used])


def test_transpose_by_hand(cupy):
    m = torch.randn(72, 136, device="cuda").bfloat16()
    out = torch.empty(136, 72, dtype=m.dtype, device="cuda")
    torch.cuda.synchronize()
    sizes = (cupy.int32(72), cupy.int32(136))
    side = dict(TRANSPOSE.constants)["SIDE"]
    grid, threads = (-(-136 // side), -(-72 // side)), TRANSPOSE.entries["transpose_v1"].threads
    tl.kernel("transpose_v1")(grid, (threads,), (*arguments(cupy, m, out), *sizes))
    cupy.cuda.Device().synchronize()
    assert torch.equal(out, m.t())


def test_every_entry_that_this_gpu_runs_can_be_loaded(cupy):
    """Each as the library has it for bfloat16, with as many threads at most as a block of its launches has."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        pytest.skip("needs tensor cores for bfloat16")
    for source in kernels.sources().values():
        for entry in source.entries if source.runs_on(capability) else ():
            _, _, macros = kernels.choose(f"{source.name}.{entry}", {})
            found = tl.kernel(f"{source.name}.{entry}")
            threads = source.kernel(entry, tuple(macros.items())).threads
            assert 0 < found.num_regs <= 255 and found.attributes["max_threads_per_block"] == threads, entry


def test_what_this_gpu_does_not_run_is_named(cupy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(DeviceError, match="8.0 and newer; this GPU has 7.5"):
        tl.kernel("decode_down")


def test_macros_that_do_not_fit_come_with_the_compilers_log(cupy):
    with pytest.raises(CompileError, match="smxx_transpose.cu for sm_"):
        tl.kernel("transpose_v1", SIDE="not_a_number")
