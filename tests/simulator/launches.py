"""A small launch of every kernel that the simulator takes, checked against what must come out: for the tests that go
through all kernels of the registry."""

from __future__ import annotations

import torch
from tests.ops.columns.layers import Layer, pattern
from tests.ops.listed.cases import Case as ListedCase
from tests.ops.train_dense import cases as dense_cases
from tests.ops.train_kernels.row_cases import RowCase, adversarial, gate_of, with_counts
from tests.ops.train_lost.cases import Case

from tests.ops.rows import int8 as int8_rows
from tests.ops.rows import microtiles as microtile_rows
from tests.ops.rows import spmm as spmm_rows
from tests.ops.table import check
from tests.simulator import cases
from tests.simulator.pooled_cases import Pooled
from twell_lab.ops import train_columns, train_rows
from twell_lab.ops import transpose as launch_transpose


def pack(monkeypatch):
    for columns, versions in ((40, (1, 2, 3, 4)), (37, (1, 2))):
        gate = cases.gate_of("some rows over", 3, columns, torch.bfloat16, 16, 5)
        poisoned = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            for version in versions:
                cases.check_pack(gate, 16, 5, version)
        finally:
            torch.use_deterministic_algorithms(poisoned)


def _layer():
    return cases.Layer.draw(cases.gate_of("some rows over", 3, 75, torch.float16, 16, 5), 264, 16, 5, "ud")


def down(monkeypatch):
    layer = _layer()
    for gate, tail in layer.sources:
        assert all(layer.plain_error(layer.plain(version, gate, tail)) <= 1 for version in (1, 2, 3))
    pooled = Pooled.draw(gate_of(18, 300, torch.bfloat16), 264)
    for name, version in (("down", 4), ("down", 5), ("gated", 7)):
        pooled.check(name, version)


def gated(monkeypatch):
    layer = _layer()
    for gate, tail in layer.sources:
        assert all(layer.gated_error(layer.gated(version, gate, tail)) <= 1 for version in (1, 2, 3, 4))
    for version in (5, 6):
        Pooled.draw(gate_of(18, 300, torch.bfloat16), 264, biases=True).check("gated", version)


def listed(monkeypatch):
    """Light and heavy rows, gated and plain; and more tokens than the first shape of the kernel is for."""
    for gated in (True, False):
        ListedCase.draw([600, 0, 3], 264, 1200, gated, biases=True).check()
        ListedCase.draw([3] * 7, 264, 40, gated, biases=True).check()


def up(monkeypatch):
    Pooled.draw(gate_of(18, 300, torch.bfloat16), 264, start=True).check("gated", 7)


def dense(monkeypatch):
    for dtype, d_ff in ((torch.float32, 13), (torch.bfloat16, 24)):
        g, u, dh, dl1 = dense_cases.draw(5, d_ff, dtype)
        for version in (1, 2)[: 1 + (d_ff % 8 == 0)]:
            dense_cases.check_hidden(g, u, version)
            dense_cases.check_gradients(g, u, dh, dl1, version)


def rows(monkeypatch):
    """The compact list of entries, and both versions of the kernels that read it; version 1 with two warps a row. A
    gated layer, and a plain one of which two neighbouring rows are heavy and both in one block."""
    case = RowCase.draw(adversarial(36, 520, torch.bfloat16), 264, biases=True)
    s = case.survivors()
    case.check_rows(s, case.check_survivors(s))
    heavy = RowCase.draw(with_counts(torch.tensor([3, 300, 280, 9]), 1900), 264, gated=False)
    s = heavy.survivors()
    heavy.check_rows(s, heavy.check_survivors(s))
    heavy = RowCase.draw(with_counts(torch.tensor([3, 300, 280, 9]), 1900), 264)
    s = heavy.survivors()
    heavy.check_rows(s, heavy.check_survivors(s))
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


def of_table(rows, *names):
    """The cases of the table whose names have one of these in them."""

    def launch(monkeypatch):
        for case in rows.CASES:
            if not case.large and any(name in case.name for name in names):
                check(case, "cpu")

    return launch


LAUNCHES = {  # by the kernel's name
    "smxx_pack": pack,
    "smxx_down": down,
    "smxx_up": up,
    "smxx_gated": gated,
    "smxx_gated_int8": of_table(int8_rows, "float16, 3 x 75 x 1032", "bfloat16, 3 x 75 x 77"),
    "smxx_listed": listed,
    "smxx_quantise_rows": of_table(int8_rows, "rows of 77, torch.bfloat16", "rows of 2056, torch.bfloat16"),
    "smxx_survivors": rows,
    "smxx_train_rows": rows,
    "smxx_train_slabs": rows,
    "smxx_train_lost": lost,
    "smxx_lost_weights": lost,
    "smxx_train_dense": dense,
    "smxx_columns": columns,
    "smxx_weight_gradients": columns,
    "smxx_transpose": transpose,
    "smxx_find_microtiles": of_table(microtile_rows, "find_microtiles"),
    "smxx_spmm": of_table(spmm_rows, *(f"{form}_v{n}: skewed" for form in ("csr", "ell") for n in (1, 2, 3, 4))),
    "smxx_spmm_coo": of_table(spmm_rows, *(f"coo_v{n}: skewed" for n in (1, 2, 3, 4))),
}
