"""The real compiler on the row kernels of a training step: registers and spills for every kind of GPU. Needs no GPU."""

import pytest
import torch

from twell_lab.core.errors import StackError
from twell_lab.cuda import cubins, launcher
from twell_lab.ops import train_rows

try:
    cubins.compiler()
except StackError as error:
    pytest.skip(f"kernels cannot be compiled here: {error}", allow_module_level=True)

REGISTERS, LEAST_THREADS = 65_536, 448  # of a multiprocessor; that should fit it at the least
SIZES = [("sm_90", d_model) for d_model in (64, 768, 2048, 4096, 5120)]
SIZES += [(arch, d_model) for arch in cubins.ARCHITECTURES if arch != "sm_90" for d_model in (72, 2048)]


def threads_a_block(file, kernel, defines):
    if file == train_rows.SURVIVORS:
        return train_rows._PLACE_THREADS if "places" in kernel else 32 * train_rows._PACKED_ROWS
    return 32 * (train_rows._SLAB_WARPS if file == train_rows.SLABS else defines["WARPS"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch, d_model", SIZES)
def test_no_spills_and_registers_within_what_a_multiprocessor_has(arch, d_model, dtype, tmp_path):
    builds = train_rows.builds(dtype, d_model)
    assert {file for file, _ in builds} == {train_rows.SURVIVORS, train_rows.ROWS, train_rows.SLABS}
    for file, defines in builds:
        kernels = cubins.resources(cubins.compile(file, arch, dict(defines), cache_in=tmp_path).log)
        assert kernels
        for name, used in kernels.items():
            assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, f"{name}: {used}"
            threads = threads_a_block(file, name, dict(defines))
            resident = REGISTERS // (-(-used["registers"] // 8) * 8 * threads) * threads
            assert resident >= max(LEAST_THREADS // threads * threads, threads), f"{name}: {used}, {threads} threads"


def test_the_builds_are_what_is_launched(monkeypatch):
    """For the widths that are cut and those that are not."""
    from tests.ops.train_kernels.row_cases import RowCase, gate_of
    from twell_lab import simulator

    if not simulator.available():
        pytest.skip("needs a C++ compiler")
    launched, launch_one = set(), launcher._launch

    def note(kernel, *rest):
        launched.add((kernel.file, kernel.defines))
        return launch_one(kernel, *rest)

    monkeypatch.setattr(launcher, "_launch", note)
    case = RowCase.draw(gate_of(2, 8, torch.bfloat16, 0.5), 1024)
    s = case.survivors()
    for version in (1, 2):
        case.check_rows(s, case.check_survivors(s), version)
    assert launched == set(train_rows.builds(torch.bfloat16, 1024))
