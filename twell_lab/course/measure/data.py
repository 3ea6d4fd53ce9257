"""Measurements that the first notebooks make, as functions: data in, data out, nothing drawn.

Everything here runs on a CPU and on a GPU. Times are in milliseconds; a `clock` result maps names to samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ... import core
from ...bench.comparison import FORMATS, quantile
from ...formats.classic import CSR
from ...models.thresholds import calibrate
from ...models.tiny import LanguageModel
from ...ops import clock as clocks
from ...records import flat_rows, is_cpu, load_all
from ...sparsities.magnitude import magnitude_mask
from ...training.text import source
from ..recorded import LOGNORMAL, newest

Samples = dict[str, list[float]]

# ---- what a clock says ----


def clock(calls: dict[str, Callable[[], object]], device: str = "cpu", seconds: float = 0.5) -> Samples:
    """Milliseconds of each call, the calls in turn: device events with a cold cache on a GPU, wall time on a CPU.

    seconds: how long to measure altogether, on a CPU; each call is made at least 40 times.
    """
    timed = {name: (lambda turn, call=call: call()) for name, call in calls.items()}
    with torch.inference_mode():
        return clocks.time_cuda(timed) if device == "cuda" else clocks.time_cpu(timed, seconds)


def median(samples: list[float]) -> float:
    """The middle of the samples."""
    return clocks.quartiles(samples)[0]


def compare(samples: Samples, name: str, base: str) -> str:
    """One sentence on whether `name` is faster than `base`; a difference within the samples' spread counts as none."""
    (new, new_spread), (old, old_spread) = clocks.quartiles(samples[name]), clocks.quartiles(samples[base])
    sentence = f"{name}: {ms(new)} against {ms(old)} for {base}"
    # Half a distance between quartiles either side of the median is where the middle half of the samples lies.
    if abs(new - old) <= (new_spread + old_spread) / 2 or 0.95 <= old / new <= 1.05:
        busy = new_spread > new / 2 or old_spread > old / 2
        return f"{sentence}, no clear difference{': the samples spread as on a busy machine' * busy}."
    return f"{sentence}, {old / new:.1f}x as fast." if new < old else f"{sentence}, {new / old:.1f}x as slow."


def as_fast(samples: Samples, name: str, base: str) -> str:
    """Return how many times as fast as `base` a call is, as text: "2.24x (2.10 to 2.41)".

    By the medians; in brackets by its slower quartile and the base's faster one, and the other way around."""
    x, low, high = ratios(samples[name], samples[base])
    return f"{x:.3g}x ({low:.3g} to {high:.3g})"


def ratios(new: list[float], old: list[float]) -> tuple[float, float, float]:
    """Old over new: of the medians, and from quartile to quartile. Above 1 at its lowest: new is faster, and the middle
    halves of the samples lie apart."""
    middle, low, high = (quantile(old, 1 - share) / quantile(new, share) for share in (0.5, 0.75, 0.25))
    return middle, low, high


def ms(value: float) -> str:
    """A time as text, in the unit that suits it."""
    if value < 0.1:
        return f"{1000 * value:.3g} us"
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


# ---- right and wrong results ----


def relative_error(y: Tensor, exact: Tensor) -> float:
    """|y - exact| / |exact|, as norms over everything, in float64."""
    y, exact = y.double(), exact.double()
    return float((y - exact).norm() / exact.norm())


# ---- where sparse begins to win ----


def multipliers(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute a @ b, as calls without arguments; the conversion of `a` is done before, once.

    a: [rows, columns], mostly zeros; b: [columns, width]. COO and CSR go through torch.sparse, which calls cuSPARSE
    on a GPU and MKL on a CPU; ELL goes through embedding_bag, which gathers rows of b, scales and adds them. A way that
    torch does not have for this dtype on this device is left out.
    """
    calls = {form.name: partial(form.multiply, form.convert(a), b) for form in FORMATS[:3]}
    return {"dense": lambda: a @ b} | {name: call for name, call in calls.items() if runs_here(call)}


def runs_here(call: Callable[[], Tensor]) -> bool:
    """Return whether torch has what this call needs. Too little memory is an error nevertheless."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


def recorded(kind: str) -> list[dict]:
    """Rows of this kind from the newest record of each GPU in this checkout, with the record's date. May be empty.

    torch's own kernels were timed, none of this project's, so no change of ours makes these rows stale.
    """
    newest: dict[str, list[dict]] = {}
    for record in load_all():  # oldest first
        here = [
            {**row, "date": record.date} for row in record.rows if row.get("kind") == kind and not is_cpu(row["device"])
        ]
        newest |= {device: [row for row in here if row["device"] == device] for device in {r["device"] for r in here}}
    return [row for rows in newest.values() for row in rows]


def _is_layer(row: dict, d_model: int, d_ff: int, nnz: float) -> bool:
    """Return whether a row times the TwELL path of a layer of this size and about this mean nnz on a GPU."""
    return (
        (row.get("kind"), row.get("path")) in (("ffn_forward", "twell"), ("inference", "forced twell"))
        and not is_cpu(row["device"])
        and (row["d_model"], row["d_ff"]) == (d_model, d_ff)
        and 0.8 * nnz < row["nnz"] < 1.25 * nnz
        and "lognormal" in (row["workload"] or "")
    )


def recorded_layers(d_model: int, d_ff: int, nnz: float) -> list[dict]:
    """Flat rows of recorded GPU runs of a sparse layer of this size and about this mean nnz, from few tokens to many.

    Where several records timed the same number of tokens, the newest; no stale ones of a GPU and dtype that has others.
    `path` is "twell" in all. May be empty.
    """
    rows = [row | {"path": "twell"} for row in flat_rows(load_all()) if _is_layer(row, d_model, d_ff, nnz)]
    fresh = {(row["device"], row["dtype"]) for row in rows if not row["stale"]}
    rows = [row for row in rows if not row["stale"] or (row["device"], row["dtype"]) not in fresh]
    newest_of = {(row["device"], row["dtype"], row["tokens"]): row for row in rows}  # they come oldest first
    return sorted(newest_of.values(), key=lambda row: row["tokens"])


def recorded_calls(d_model: int, d_ff: int, nnz: float) -> list[dict]:
    """Rows of the inference record, from few tokens to many: layers of this size on the TwELL path of a GPU, about this
    mean nnz. `ms` and `dense_ms` are the GPU's time; `wall_ms` and `dense_wall_ms`, which older records lack, that of
    plain calls. Each has `where`. May be empty."""

    def wanted(row: dict) -> bool:
        return row.get("workload") == LOGNORMAL and _is_layer(row, d_model, d_ff, nnz)

    return sorted(newest("inference", "", wanted), key=lambda row: row["tokens"])


def turning(table: list[dict], path: str) -> str:
    """Up to which measured density `path` is faster than dense, and from which on slower, in words.

    Faster or slower means that the middle halves of the samples lie apart: a density at which they overlap is in
    neither range. table: rows of `against_density`, or of one device in `recorded`, those of "dense" among them."""
    dense = {row["density"]: row["samples"] for row in table if row["path"] == "dense"}
    rows = sorted((row for row in table if row["path"] == path), key=lambda row: row["density"])
    if not rows:
        return "torch has no such kernel for this dtype on this device" if table else "not recorded in this checkout"
    sure = [ratios(row["samples"], dense[row["density"]])[1:] for row in rows]
    faster = next((i for i, (low, _) in enumerate(sure) if low <= 1), len(sure))
    slower = len(sure) - next((i for i, (_, high) in enumerate(reversed(sure)) if high >= 1), len(sure))
    said = [f"faster up to {_percent(rows[faster - 1]['density'])}"] * bool(faster)
    said += [f"slower from {_percent(rows[slower]['density'])}"] if slower < len(rows) else []
    return ", ".join(said) or "no clear difference"


def _percent(share: float) -> str:
    """A density with the one digit that it was asked for with: "0.2%" of 4 values in 2,048."""
    return f"{float(f'{100 * share:.1g}'):g}%"


# ---- one token: zeros in the weights, or in the activations ----


def weights_or_activations(
    hidden: Tensor, down: Tensor, shares: list[float], device: str, seconds: float = 1.0
) -> tuple[list[dict], Samples]:
    """One token's down projection with zeros in the weights (magnitude pruning, CSR) or in the activations.

    hidden: [1, d_ff], exact zeros where neurons are silent; down: [d_model, d_ff].
    Returns rows {path, zeros (share), bytes (of weights read), error (relative, against float64), ms}, and samples.
    """
    down_t = down.t().contiguous()
    exact = hidden.double() @ down_t.double()
    firing = hidden[0].nonzero()[:, 0]
    calls = {"dense": lambda: hidden @ down_t}
    about = {"dense": (0.0, down.numel() * down.element_size())}
    for share in shares:
        pruned = torch.where(magnitude_mask(down, share), down, 0)
        stored, column = pruned.to_sparse_csr(), hidden.t().contiguous()
        name = f"weights {share:.0%} zero, as CSR"
        calls[name] = lambda stored=stored, column=column: (stored @ column).t()
        about[name] = (share, CSR.from_dense(pruned).nbytes)
    name = f"silent neurons skipped ({1 - firing.numel() / hidden.shape[1]:.1%} zero)"
    calls[name] = lambda: hidden[:, firing] @ down_t[firing]
    about[name] = (1 - firing.numel() / hidden.shape[1], firing.numel() * down.shape[0] * down.element_size())
    calls = {name: call for name, call in calls.items() if runs_here(call)}
    errors = {name: relative_error(call(), exact) for name, call in calls.items()}
    samples = clock(calls, device, seconds)
    rows = [
        {"path": name, "zeros": about[name][0], "bytes": about[name][1], "error": errors[name], "ms": median(values)}
        for name, values in samples.items()
    ]
    return rows, samples


# ---- a threshold on a layer that was not trained for one ----


def cut_trained(sparsities: tuple[float, ...] = (0.98, 0.99, 0.995), windows: int = 96) -> list[dict]:
    """Return what cutting costs a model that was trained with L1 (data/checkpoints/small) on held-out Python source:
    rows {density, error (of a layer's output, relative to the uncut one's norm; both means over layers), more (loss, as
    a share of what it was)}, the first of the model as it is.

    Thresholds are chosen on every second window, and the loss is that of the others."""
    model = LanguageModel.load(core.data_dir() / "checkpoints" / "small")
    text = source.standard_library().split()[1].tokens
    tokens = source.spread_windows(text, windows, model.config.context)[:, :-1].long()
    chosen = calibrate(model, tokens[::2].split(16), method="cats")
    made = []
    for sparsity in (0.0, *sparsities):
        found = chosen.at(sparsity)
        cost = found.loss(model, tokens[1::2])
        densities = [layer.density["activation"] for layer in found.layers]
        errors = [layer.error for layer in found.layers]
        made.append(
            {
                "density": sum(densities) / len(densities),
                "error": sum(errors) / len(errors),
                "more": cost.thresholded / cost.dense - 1,
            }
        )
    return made
