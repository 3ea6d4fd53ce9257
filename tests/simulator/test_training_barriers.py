"""Every barrier of the kernels of a training step deleted, one at a time: the simulator finds a fault, or a result is
wrong.

The inference kernels have this and their shifted bounds in test_mutants.py.
"""

import re
from contextlib import nullcontext

import pytest
import torch

from tests.ops.columns.layers import Layer, pattern
from tests.ops.train_kernels.row_cases import RowCase, adversarial
from tests.ops.train_lost.cases import Case
from twell_lab import simulator
from twell_lab.core import folders
from twell_lab.core.errors import TwellError
from twell_lab.ops import train_columns, train_rows
from twell_lab.ops import transpose as launch_transpose

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
BARRIER = "__syncthreads();"


def rows(monkeypatch):
    """The compact list of the entries, and both versions of what reads it; version 1 with two warps a row."""
    case = RowCase.draw(adversarial(36, 520, torch.bfloat16), 264, biases=True)
    s = case.survivors()
    case.check_rows(s, case.check_survivors(s))
    case = RowCase.draw(adversarial(36, 520, torch.bfloat16)[:8], 1032, biases=True)
    s = case.survivors()
    train_rows.hidden_gradient(case.dy, s, case.down_t, None, 1)


def columns(monkeypatch):
    monkeypatch.setattr(train_columns, "_COUNTS", 13 * 3)
    fires = pattern(700, 13, 0.1)
    fires[:, 7] = torch.arange(700) % 2 == 0
    Layer.draw(fires, 16).check(version=2)


def lost(monkeypatch):
    Case.draw(
        620, 24, 38, torch.bfloat16, range(5, 605), biases=True
    ).check()  # several groups a block, several batches


def transpose(monkeypatch):
    m = torch.randn(72, 136).bfloat16()
    assert torch.equal(launch_transpose.transposed(m), m.t())


FILES = {
    "smxx_survivors.cu": rows,
    "smxx_train_rows.cu": rows,
    "smxx_columns.cu": columns,
    "smxx_weight_gradients.cu": columns,
    "smxx_train_lost.cu": lost,
    "smxx_lost_weights.cu": lost,
    "smxx_transpose.cu": transpose,
}
HEADERS = {"lost_rows.cuh": "smxx_train_lost.cu"}  # and a file that includes it
# (file, what stands before it): why nothing can be noticed.
SPARE = {
    (
        "smxx_train_lost.cu",
        "kept[place] = all;\n    }\n    ",
    ): "the next group begins with two barriers before what this one guards is written"
}
WITHOUT = {"smxx_train_slabs.cu", "smxx_train_dense.cu"}  # a warp does its work alone


def barriers():
    found = []
    for file in [*FILES, *HEADERS]:
        text = (folders.kernels_dir() / file).read_text()
        found += [
            pytest.param(file, match.start(), id=f"{file}:{text.count(chr(10), 0, match.start()) + 1}")
            for match in re.finditer(re.escape(BARRIER), text)
        ]
    return found


def test_every_file_is_looked_at():
    for file in WITHOUT:
        assert "__syncthreads" not in (folders.kernels_dir() / file).read_text()
    assert len(barriers()) > 20


@pytest.mark.parametrize("kernel", FILES)
def test_without_a_deletion_nothing_is_noticed(kernel, tmp_path, monkeypatch):
    for name in (kernel, *HEADERS):
        (tmp_path / name).write_text((folders.kernels_dir() / name).read_text())
    with simulator.watching("faults", replace={kernel: tmp_path / kernel}) as runs:
        FILES[kernel](monkeypatch)
    assert runs


@pytest.mark.parametrize("file, at", barriers())
def test_a_deleted_barrier_is_noticed(file, at, tmp_path, monkeypatch):
    kernel = HEADERS.get(file, file)
    text = (folders.kernels_dir() / file).read_text()
    (tmp_path / file).write_text(text[:at] + text[at + len(BARRIER) :])
    if kernel != file:
        (tmp_path / kernel).write_text((folders.kernels_dir() / kernel).read_text())
    spare = any(file == name and text[:at].endswith(before) for name, before in SPARE)
    noticed = nullcontext() if spare else pytest.raises((TwellError, AssertionError))
    with noticed, simulator.watching("faults", replace={kernel: tmp_path / kernel}):
        FILES[kernel](monkeypatch)
