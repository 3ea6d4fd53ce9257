"""The lost rows that tensor cores compute, in the simulator with C++ in the place of the kernels' PTX, beside float64."""

from pathlib import Path

import pytest
import torch

from tests.ops.train_lost.cases import Case, bits
from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.cuda import launcher
from twell_lab.ops import train_lost

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


class Simulated:
    """A kernel of sm80_train_lost.cu as the launcher's, but compiled from `source`."""

    def __init__(self, source: Path, name: str, defines: tuple, shared: int):
        self.shared = shared
        self.made = launcher.kernel(source.name, name, defines)
        self.program = simulator.compile(source, dict(defines))

    def launch(self, device, grid, arguments) -> None:
        launcher.check_arguments(self.made.entry, arguments)
        how = {"watch": None, "shared_bytes": self.shared}
        self.program.launch(self.made.name, grid[0], self.made.entry.threads, arguments, **how)


@pytest.fixture
def room(monkeypatch):
    """A function that lets so many lost rows be computed on "tensor cores", by a grid of so many blocks."""
    source, real = without_ptx(train_lost.TENSOR_FILE), train_lost.kernel

    def kernel(file, name, defines, shared=0):
        ours = file == train_lost.TENSOR_FILE
        return Simulated(source, name, defines, shared) if ours else real(file, name, defines, shared)

    monkeypatch.setattr(train_lost, "kernel", kernel)

    def set_room(rows: int, blocks: int) -> None:
        monkeypatch.setattr(train_lost, "held", lambda x: min(rows, len(x)))
        monkeypatch.setattr(train_lost, "multiprocessors", lambda index: -(-blocks // train_lost._RESIDENT))

    return set_room


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, d_model, d_ff, lost, rows, blocks",
    [
        (150, 40, 134, 140, 150, 2),  # two tiles of rows; a block has several tiles
        (12, 136, 600, 9, 12, 16),  # blocks share the tiles of y
        (9, 8, 1, 2, 9, 2),
        (24, 40, 72, 20, 6, 2),  # those behind the sixth are computed without tensor cores
        (5, 40, 72, 0, 5, 2),
    ],
)
def test_against_float64(room, tokens, d_model, d_ff, lost, rows, blocks, gated):
    room(rows, blocks)
    for biases, slope in ((False, True), (True, False)):
        dtype = torch.float16 if biases else torch.bfloat16
        case = Case.draw(tokens, d_model, d_ff, dtype, range(1, 1 + lost), gated=gated, biases=biases, slope=slope)
        if lost > 5:
            case.x[3, 2], case.x[5, -1] = torch.nan, -torch.inf
            case.dy[3] = torch.nan  # as it is behind a y that is NaN
        case.check()


def test_a_rows_bits_do_not_depend_on_what_else_the_room_holds(room):
    """With as many blocks for a tile; and what lies past the list is never read: Case puts numbers far outside there."""
    room(40, 2)
    case = Case.draw(40, 64, 70, torch.bfloat16, range(2, 34), biases=True)
    one = Case(**{**vars(case), "rows": case.rows[5:6]})
    row = int(case.rows[5])
    for all_of_them, alone in zip((*case.forward(), case.backward()[0]), (*one.forward(), one.backward()[0])):
        assert torch.equal(bits(all_of_them[row]), bits(alone[row]))
