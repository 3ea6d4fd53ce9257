"""Every build of every source for every architecture, type of values and some widths: about an hour of one core."""

import pytest
import torch

from tests.cuda import declared
from twell_lab.core import StackError
from twell_lab.cuda import compile as compiler
from twell_lab.ops import kernels

try:
    compiler.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def jobs():
    wanted = [(arch, FP16 if arch == "sm_75" else BF16, [2048]) for arch in compiler.ARCHITECTURES]
    wanted += [("sm_75", FP32, [2048]), ("sm_90", FP16, [2048]), ("sm_90", FP32, [2048])]
    wanted.append(("sm_90", BF16, [8, 64, 768, 2056, 5120]))
    each = [(divmod(int(arch.removeprefix("sm_")), 10), [dtype], widths) for arch, dtype, widths in wanted]
    found = dict.fromkeys(build for given in each for build in kernels.builds(*given))
    return [(source.name, target, macros) for source, target, macros in found]


@pytest.mark.parametrize("job", jobs(), ids=declared.called)
def test_entries_threads_and_what_ptxas_used(job, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_CUBINS", raising=False)
    declared.check(*job)
