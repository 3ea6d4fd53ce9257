"""What surrounds the gate GEMMs that pack: tensor maps, the choice of a setup, and what they take."""

from itertools import product

import pytest
import torch

from twell_lab.cuda.launch import Call, layout
from twell_lab.ops import gate_pack

BF16, FP16, HOPPER = torch.bfloat16, torch.float16, (9, 0)


def box_of(made, corner):
    """Weight rows that a copy brings, as numbers, None beyond the matrix. Row i of the weights lies at i * stride."""
    row, brought = made.strides[0], []
    for index in product(*(range(size) for size in reversed(made.box[1:]))):
        at = [first + i for first, i in zip(corner, reversed(index))]
        offset = made.of.offset + sum(a * stride for a, stride in zip(at, made.strides))
        assert offset % row == 0
        brought.append(offset // row if all(a < size for a, size in zip(at, made.dims[1:])) else None)
    return brought


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("d_ff", [8, 232, 256, 512, 768 + 16, 1000])
def test_each_lane_of_a_quad_gets_neighbouring_columns(d_ff, cluster):
    """The tile that the kernel's copies build in shared memory, column by column of the product."""
    gate = Call(torch.device("cpu")).input(torch.zeros(d_ff, 144, dtype=BF16)[:, :128])
    whole, narrow = gate_pack._gate_maps(gate, cluster)
    width = d_ff % 256
    for n in range(-(-d_ff // 256)):
        last = (n + 1) * 256 > d_ff
        span, column = width // 4 if last else 64, []
        for rank in range(cluster):
            column += box_of(narrow if last else whole, (0, 0, rank * (32 // cluster), 0 if last else n))
        assert len(column) == 256
        for at, row in enumerate(column):  # column `at` of the product is in lane q, register pair j, half e
            j, q, e = at // 8, at % 8 // 2, at % 2
            assert row == (256 * n + span * q + 2 * j + e if 2 * j + e < span else None)


def test_what_they_take():
    x, gate = torch.zeros(3, 64, dtype=BF16), torch.zeros(24, 64, dtype=BF16)
    sm90 = lambda x, gate, on=HOPPER: gate_pack.takes_sm90(on, layout(x), layout(gate))  # noqa: E731
    sm80 = lambda x, gate, on=(8, 0): gate_pack.takes_sm80(on, layout(x), layout(gate))  # noqa: E731
    for takes in (sm90, sm80):
        assert takes(x, gate) and takes(x[:1], gate[8:]) and takes(x[:0], gate)
        assert not takes(x, gate[:20]) and not takes(x, gate.half()) and not takes(x.float(), gate.float())
        assert not takes(x[:, 1:], gate[:, 1:]) and not takes(x.t().contiguous().t(), gate)
        assert not takes(x[:, :60].contiguous(), gate[:, :60].contiguous())
    wide = torch.zeros(3, 128, dtype=BF16)
    assert sm90(wide[:, 64:], gate) and not sm80(wide[:, 64:], gate)
    assert not sm90(x, gate, (8, 0)) and not sm90(x, gate, (10, 0))
    assert not sm80(x, gate, (7, 5)) and sm80(x.half(), gate.half(), (7, 5)) and sm80(x, gate, (12, 0))


@pytest.mark.parametrize(
    "capability, newest", [((7, 5), (3, 32, 2)), ((8, 0), (3, 64, 3)), ((8, 6), (3, 32, 4)), (HOPPER, (4, 64, 3))]
)
def test_each_gpu_gets_the_newest_setup_that_fits_its_shared_memory(capability, newest):
    setup = gate_pack.setup_for(capability)
    assert setup[:3] == newest and setup.shared <= gate_pack.most_shared(capability)
