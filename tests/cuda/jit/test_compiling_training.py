"""The real compiler on every kernel of a training step, for every architecture. Needs no GPU; what each room expects of
its kernels' registers stands in that room's tests."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from twell_lab.core.errors import StackError
from twell_lab.cuda import cubins as jit
from twell_lab.ops import train_columns, train_dense, train_lost, train_rows, transpose

try:
    jit.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)


def training_builds(dtype, d_model=2048):
    """(file, macros) of what training a layer with values of this dtype compiles."""
    return [
        *train_rows.builds(dtype, d_model),
        *train_columns.builds([dtype]),
        *train_lost.builds(dtype),
        *train_dense.builds(dtype),
        *transpose.builds(dtype),
    ]


@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
def test_every_kernel_of_a_training_step_compiles(arch, tmp_path):
    dtype = torch.float16 if arch == "sm_75" else torch.bfloat16  # the type that has tensor cores there
    builds = training_builds(dtype)
    with ThreadPoolExecutor(2) as pool:
        cubins = list(pool.map(lambda build: jit.compile(build[0], arch, dict(build[1]), cache_in=tmp_path), builds))
    for (file, _), cubin in zip(builds, cubins):
        used = jit.resources(cubin.log)
        assert used and all(kernel["registers"] <= 255 for kernel in used.values()), file
