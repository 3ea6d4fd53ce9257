"""A small launch of every kernel that the simulator takes as it is, beside its reference: those cases of the table that
between them run each of its kernels."""

from __future__ import annotations

from unittest import mock

from tests.ops.table import Case, cases, check
from twell_lab.ops import columns, kernels

SIMULATED = [name for name in kernels.sources() if name.startswith("smxx_")]
# What is in the names of the cases that reach every barrier of a source; for others: one case of each version.
CHOSEN = {
    "smxx_survivors": ("survivors ", "train heavy rows", "train step: torch.bfloat16"),
    "smxx_train_rows": ("train first versions: torch.bfloat16", "train first versions, wide rows"),
    "smxx_train_slabs": ("train step: torch.bfloat16", "train heavy rows"),
    "smxx_train_lost": ("train lost rows", "train many rows lost"),
    "smxx_lost_weights": ("train lost rows", "train many rows lost"),
    "smxx_columns": ("train step: torch.bfloat16", "train long lists"),
    "smxx_weight_gradients": ("train step: torch.bfloat16", "train long lists", "train first versions"),
    "smxx_gated_int8": (": sparse, torch.bfloat16", "signed: some over", "x 1032"),
    "smxx_transpose": ("264 x 72",),
    "smxx_listed": ("listed_v2: bfloat16", "listed_v1: bfloat16"),
    "smxx_spmm": (": skewed",),
    "smxx_spmm_coo": (": skewed",),
}


def of(name: str) -> list[Case]:
    """Return the cases that launch the kernels of a source."""
    those = [one.values[0] for one in cases(simulated=True, usual=True)]
    those = [case for case in those if any(source.name == name for source in case.sources)]
    if name in CHOSEN:
        return [case for case in those if any(part in case.name for part in CHOSEN[name])]
    return list({case.name.partition(":")[0]: case for case in reversed(those)}.values())


def launch(name: str, **watched) -> None:
    """Run them, `watched`, and compare. A chunk of rows of smxx_columns.cu is longer than the 32 rows of a turn, as it is
    from 8,193 tokens on: too many for the simulator."""
    with mock.patch.object(columns, "_LEAST_ROWS", 80):
        for case in of(name):
            check(case, "cpu", **watched)
