"""Every kernel is declared, and every launch agrees with the declaration."""

import pytest
import torch

from tests.simulator.launches import LAUNCHES
from twell_lab import core, simulator
from twell_lab.core import InputError
from twell_lab.cuda import cubins, launcher, macros, registry
from twell_lab.simulator import program

SIMULATED = [name for name, kernel in registry.KERNELS.items() if kernel.simulated]


def test_every_source_is_declared_under_its_name():
    assert set(registry.KERNELS) == {path.stem for path in core.kernels_dir().glob("*.cu")}
    assert all(kernel.name == name for name, kernel in registry.KERNELS.items())


@pytest.mark.parametrize("kernel", registry.KERNELS.values(), ids=lambda kernel: kernel.name)
def test_each_says_what_bounds_it_and_where_it_runs(kernel):
    assert 5 < len(kernel.bound) < 120 and "\n" not in kernel.bound
    assert kernel.name.startswith("sm90_") == kernel.alone
    assert kernel.runs_on(kernel.oldest) and not kernel.runs_on((7, 0))
    assert kernel.runs_on((12, 0)) == (not kernel.alone)
    assert kernel.target("sm_90") == ("sm_90a" if kernel.alone else "sm_90")


@pytest.mark.parametrize("arch", cubins.ARCHITECTURES)
def test_a_build_is_there_for_every_kernel_of_a_gpu(arch):
    capability = divmod(int(arch.removeprefix("sm_")), 10)
    found = registry.builds(capability, list(macros.VALUE), [64, 2048])
    assert len(set(found)) == len(found)
    assert {kernel.name for kernel, _ in found} == {
        name for name, kernel in registry.KERNELS.items() if kernel.runs_on(capability)
    }
    assert all(kernel.entries(defines) for kernel, defines in found)


def test_a_launch_of_every_kernel_that_the_simulator_takes():
    assert list(LAUNCHES) == SIMULATED


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", SIMULATED)
def test_what_is_launched_is_declared(name, monkeypatch):
    """With macros that `twell-lab compile` knows, blocks that the source allows, and arguments of the right kinds."""
    launched, launch = [], program.launch

    def note(file, entry, defines, grid, block, arguments):
        launched.append((file, entry, defines, block, list(arguments)))
        return launch(file, entry, defines, grid, block, launched[-1][-1])

    monkeypatch.setattr(program, "launch", note)
    LAUNCHES[name](monkeypatch)
    assert f"{name}.cu" in {file for file, *_ in launched}
    for file, entry, defines, block, arguments in launched:
        widths = [dict(defines).get("D_MODEL", 2048)]
        assert (registry.find(file), defines) in registry.builds((9, 0), list(macros.VALUE), widths)
        signature = registry.signature(file, entry, defines)
        assert block == (signature.threads, 1)
        launcher.check_arguments(signature, arguments)  # as before a thread's first launch on a GPU


# ---- entries and arguments


def test_an_unknown_kernel_or_entry_is_named():
    with pytest.raises(InputError, match="no kernel 'smxx_pak'; declared are smxx_pack, "):
        registry.signature("smxx_pak", "pack_v1")
    with pytest.raises(InputError, match="smxx_pack.cu has no entry 'pack_v9'; it has pack_v1, pack_v2"):
        registry.signature("smxx_pack.cu", "pack_v9")
    with pytest.raises(InputError, match="has no entry 'down_v6'"):
        registry.signature("smxx_down", "down_v6", macros.specialisation(torch.bfloat16, 64))
    assert registry.signature("smxx_down", "down_v6").name == "down_v6"


GATE = torch.zeros(2, 16, dtype=torch.float16)
PACKED = torch.zeros(2, 1, 4, dtype=torch.int32)
NUMBERS = (2, 16, 16, 4)
HALF = macros.value(torch.float16)


@pytest.mark.parametrize(
    "arguments",
    [
        (GATE, PACKED, *NUMBERS),
        (None, None, *NUMBERS),
        (GATE.data_ptr(), PACKED.data_ptr(), *NUMBERS),
        (GATE.view(torch.int16), PACKED, 2**40, 1, 1, -(2**31)),
        (GATE, torch.zeros(64, dtype=torch.uint8), *NUMBERS),
    ],
)
def test_arguments_that_are_taken(arguments):
    launcher.check_arguments(registry.signature("smxx_pack", "pack_v2", HALF), arguments)


@pytest.mark.parametrize(
    "at, given, told",
    [
        (0, GATE.float(), r"gate of pack_v2 is a tensor of torch.float32; a tensor for __half\*, None or an address"),
        (0, GATE.bfloat16(), "gate of pack_v2 is a tensor of torch.bfloat16"),
        (0, 1.5, "gate of pack_v2 is float 1.5"),
        (1, PACKED.long(), r"packed of pack_v2 is a tensor of torch.int64; a tensor for unsigned\*"),
        (2, GATE, r"rows of pack_v2 is a tensor of torch.float16; a whole number from .* \(long long\)"),
        (2, True, "rows of pack_v2 is bool True"),
        (3, 2**31, r"columns of pack_v2 is int 2147483648; a whole number from -2147483648 to 2147483647 \(int\)"),
        (3, 1.0, "columns of pack_v2 is float"),
        (4, None, "tile of pack_v2 is NoneType None"),
    ],
)
def test_an_argument_of_another_kind_is_named(at, given, told):
    arguments = [GATE, PACKED, *NUMBERS]
    arguments[at] = given
    with pytest.raises(InputError, match=told):
        launcher.check_arguments(registry.signature("smxx_pack", "pack_v2", HALF), arguments)


def test_one_argument_too_few_is_named():
    with pytest.raises(InputError, match=r"pack_v2 takes 6 arguments \(gate, packed, rows, columns, tile, words\); 5"):
        launcher.check_arguments(registry.signature("smxx_pack", "pack_v2"), (GATE, PACKED, *NUMBERS[1:]))


def test_a_structure_goes_by_its_bytes():
    signature = registry.signature("sm90_gate_up", "gate_up")
    maps = [each for each in signature.parameters if each.type == "TensorMap"]
    assert len(maps) == 4 and signature.parameters[:4] == tuple(maps)
    others = [None if each.pointer else 1 for each in signature.parameters[4:]]
    launcher.check_arguments(signature, [*[bytes(128)] * 4, *others])
    with pytest.raises(InputError, match="is NoneType None; the bytes of one TensorMap is accepted"):
        launcher.check_arguments(signature, [*[bytes(128)] * 3, None, *others])
