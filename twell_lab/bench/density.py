"""Products of a sparse matrix in several formats beside the dense product, over the matrix's density.

All go through torch's own kernels, on a CPU and on a GPU. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..core import InputError
from ..formats.classic import ELL
from ..ops import clock as clocks
from ..records import Record
from .rows import row

Samples = dict[str, list[float]]

DENSITY = "matmul_density"  # the kind of a row of density_record
SIZES = {"cpu": (256, 2048, 1024), "cuda": (4096, 5632, 2048)}  # rows, columns, width of the products timed
DENSITIES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3]


def scattered(rows: int, columns: int, per_row: int, *, dtype=torch.float32, device="cpu", seed: int = 0) -> Tensor:
    """[rows, columns] with exactly `per_row` standard normal values in each row, at random places, zeros elsewhere."""
    if not 0 <= per_row <= columns:
        raise InputError(f"per_row is {per_row}; 0 to {columns} (the columns) can be placed")
    generator = torch.Generator(device).manual_seed(seed)
    places = torch.rand(rows, columns, generator=generator, device=device).topk(per_row, dim=1).indices
    # 0.1 away from zero, so that no value rounds to a zero that a format would rightly leave out.
    values = torch.randn(rows, per_row, generator=generator, device=device)
    values = values + 0.1 * torch.where(values < 0, -1.0, 1.0)
    return torch.zeros(rows, columns, device=device).scatter_(1, places, values).to(dtype)


def clock(calls: dict[str, Callable[[], object]], device: str = "cpu", seconds: float = 0.5) -> Samples:
    """Milliseconds of each call, the calls in turn: device events with a cold cache on a GPU, wall time on a CPU.

    seconds: how long to measure altogether, on a CPU; each call is made at least 40 times.
    """
    timed = {name: (lambda turn, call=call: call()) for name, call in calls.items()}
    with torch.inference_mode():
        return clocks.time_cuda(timed) if device == "cuda" else clocks.time_cpu(timed, seconds)


def multipliers(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute a @ b, as calls without arguments; the conversion of `a` is done before, once.

    a: [rows, columns], mostly zeros; b: [columns, width]. COO and CSR go through torch.sparse, which calls cuSPARSE
    on a GPU and MKL on a CPU; ELL goes through embedding_bag, which gathers rows of b, scales and adds them. A way that
    torch does not have for this dtype on this device is left out.
    """
    coo, csr, ell = a.to_sparse_coo().coalesce(), a.to_sparse_csr(), ELL.from_dense(a)
    calls = {
        "dense": lambda: a @ b,
        "COO": lambda: torch.sparse.mm(coo, b),
        "CSR": lambda: csr @ b,
        "ELL": lambda: ell_matmul(ell, b),
    }
    return {name: call for name, call in calls.items() if runs_here(call)}


def runs_here(call: Callable[[], Tensor]) -> bool:
    """Return whether torch has what this call needs. Too little memory is an error nevertheless."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


def ell_matmul(a: ELL, b: Tensor) -> Tensor:
    """a [rows, columns] @ b [columns, width]: each slot gathers a row of b. Unused slots hold column 0, value 0."""
    if a.slots == 0:
        return b.new_zeros(a.shape[0], b.shape[1])
    return embedding_bag(a.column, b, per_sample_weights=a.value, mode="sum")


def against_density(
    columns: int, width: int, rows: int, densities: list[float], device: str, dtype: torch.dtype, seconds: float = 0.4
) -> list[dict]:
    """Time each format at each density, beside the dense product of [rows, columns] and [columns, width].

    Returns rows {density, nnz (a row), path, ms, spread, dense_ms, x_dense (times as fast as dense), samples}. The
    path "CSR + conversion" also makes the CSR form from the dense matrix, as fresh activations would need.
    """
    generator = torch.Generator(device).manual_seed(1)
    b = torch.randn(columns, width, generator=generator, device=device).to(dtype)
    table = []
    for density in densities:
        per_row = max(1, round(density * columns))
        a = scattered(rows, columns, per_row, dtype=dtype, device=device)
        calls = multipliers(a, b)
        if "CSR" in calls:
            calls["CSR + conversion"] = lambda a=a: a.to_sparse_csr() @ b
        times = clock(calls, device, seconds)
        dense = clocks.quartiles(times["dense"])[0]
        shared = {"density": per_row / columns, "nnz": per_row}
        table += [row(shared, path, samples, dense) for path, samples in times.items()]
    return table


def density_record() -> Record:
    """A record of `against_density` on this machine's GPU, or its CPU, and of a dense product of zeros."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows, columns, width = SIZES[device]
    where = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": rows,
        "d_model": width,
        "d_ff": columns,
    }
    table = against_density(columns, width, rows, DENSITIES, device, dtype, seconds=3.0)
    measured = [{"kind": DENSITY, **where, "workload": "scattered", **each} for each in table]
    b = scattered(columns, width, width, dtype=dtype, device=device)
    full, empty = (scattered(rows, columns, count, dtype=dtype, device=device) for count in (columns, 0))
    times = clock({"random": lambda: full @ b, "zeros": lambda: empty @ b}, device, 3.0)
    for workload, samples in times.items():
        measured.append(row({"kind": "matmul_data", **where, "workload": workload}, "dense", samples))
    return Record.new("density", "sparse formats against a dense product across densities, through torch", measured)
