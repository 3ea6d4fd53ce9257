"""What the notebook on choosing a path computes: what methods that skip silent neurons compute, and which is fastest
where. All but those that are lossy or another layer, as their names say, are held against the dense layer first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ... import records
from ...bench import methods
from ...bench import rows as bench_rows
from ...bench.comparison import quantile
from ...bench.methods import DENSE, HEIGHT, INEXACT, PACKED, SHARES, SPLIT, sizes_for
from ...ops import clock
from ..recorded import LOGNORMAL, newest, sourced

SKIPPED, FOR_NOTHING, NEEDED, MISSED = range(4)


def works(fires: Tensor, tokens: int = 64, neurons: int = 64) -> dict[str, Tensor]:
    """Return what each method computes of a corner of `fires` [tokens, d_ff], the neurons that fire most first: int64
    [tokens, neurons] of SKIPPED, FOR_NOTHING, NEEDED and MISSED, by the method's name."""
    order = fires.sum(0).argsort(descending=True, stable=True)
    corner = fires[:tokens, order[: 6 * neurons : 6]]  # every sixth, from the busiest to those that fire rarely
    first = lambda count: (torch.arange(neurons) < count).expand(tokens, neurons)
    computed = {
        DENSE: torch.ones_like(corner),
        "packed, each entry alone": corner,
        "hot and cold": corner | first(6),
        "micro-tiles of 32 tokens": corner.view(-1, HEIGHT, neurons).any(1).repeat_interleave(HEIGHT, 0),
        "experts of 16 neurons": corner.view(tokens, -1, 16).any(2).repeat_interleave(16, 1),
        "the same 16 for all (lossy)": first(16),
    }
    done, missing = torch.where(corner, NEEDED, FOR_NOTHING), torch.where(corner, MISSED, SKIPPED)
    return {name: torch.where(here, done, missing) for name, here in computed.items()}


def occupied(density: float, height: int) -> float:
    """The share of a stripe's columns that hold anything, if each of `height` values is there independently."""
    return 1 - (1 - density) ** height


def hot_neurons(shares: Tensor, times: float) -> Tensor:
    """The neurons that are cheaper dense, those that fire most first: int64. shares: of the tokens at which each fires.
    times: how many times as much a firing neuron costs packed as any neuron dense."""
    order = shares.argsort(descending=True, stable=True)
    return order[shares[order] * times > 1]


def token_bytes(d_model: int, d_ff: int, firing: int, rank: int, chosen: int, size: int) -> tuple[int, int, int]:
    """Bytes of weights that one token needs in a gated layer: dense; packed; and with a predictor of this rank that has
    `chosen` neurons computed. size: bytes of a value."""
    row = d_model * size
    return 3 * d_ff * row, (d_ff + 2 * firing) * row, rank * (d_model + d_ff) * size + 3 * chosen * row


# ---- the map ----


@torch.no_grad()
def map_rows(device: str, shares: Sequence[float] = SHARES) -> list[dict]:
    """{method, tokens, share, ms, x_dense, exact, where}: a gated layer at each share of firing neurons and number of
    tokens, by each method. Experts compute the same share of as many weights, and are another layer. The predictor is
    at its best: it chooses no more neurons than fire, and is not trained."""
    sizes, where = sizes_for(device), here(device)
    made = [_of_map(row | {"where": where}) for share in shares for row in methods.map_rows(share, sizes)]
    for tokens in sizes.tokens:  # who fires is all the same to the dense layer: its times are one, the median
        mine = [row for row in made if row["tokens"] == tokens]
        dense = clock.quartiles([row["ms"] for row in mine if row["method"] == DENSE])[0]
        for row in mine:
            row["ms"] = dense if row["method"] == DENSE else row["ms"]
            row["x_dense"] = dense / row["ms"]
    return made


def recorded_map() -> list[dict]:
    """Rows as of `map_rows` of "inference" records on the GPU that figures tell of (records.TOLD), of layers of 2048 x
    5632 with drawn firing rates: dense, packed, and hot and cold, each with `hot`, the neurons computed densely."""
    layer = {"kind": "inference", "d_model": 2048, "d_ff": 5632, "workload": LOGNORMAL, "gated": True}
    known, made = {"dense eager": (DENSE, 5632), "forced twell": (PACKED, 0)}, []
    for row in newest("inference", records.TOLD, lambda row: {**row, **layer} == row):
        hot = row["path"].removeprefix("forced hot_cold ")
        method = (SPLIT, int(hot)) if hot.isdigit() else known.get(row["path"])
        if method:
            said = {key: row[key] for key in ("tokens", "d_ff", "ms", "x_dense", "where")}
            said |= {"method": method[0], "hot": method[1]}
            made.append({**said, "share": row["nnz"] / row["d_ff"], "exact": True})
    return made


def recorded() -> list[dict]:
    """The rows of the newest record of the comparison (records.newest); none where this checkout has none."""
    found = records.newest(records.load_all(), "comparison")
    return sourced(found) if found else []


def recorded_maps() -> list[dict]:
    """Rows as of `map_rows` of `recorded`, with all methods that there still are."""
    rows = (_of_map(row) for row in recorded() if row["kind"] == "map")
    return [row for row in rows if row["method"] in methods.METHODS]


def _of_map(row: dict) -> dict:
    """Return a row of `methods.map_rows` as one of `map_rows`: on a CPU, which is busy, with the lower quartile."""
    method = DENSE if row["path"] == bench_rows.DENSE else row["path"]
    ms = quantile(row["samples"], 0.25) if row["device"] == "CPU" else row["ms"]
    said = {key: row[key] for key in ("tokens", "d_ff", "x_dense", "where", "share")}
    return {**said, "ms": ms, "method": method, "exact": method not in INEXACT}


def winners(rows: Iterable[dict], exact: bool = True) -> dict[tuple[float, int], dict]:
    """The fastest method by (share, tokens); dense where none is faster by a twentieth, which may be noise. exact: only
    those that compute the dense layer's result. Shares up to an eighth above another count as that one, since what is
    drawn only comes near what was asked for."""
    best: dict[tuple[float, int], dict] = {}
    first, worth = 0.0, lambda row: row["x_dense"] * (1.05 if row["method"] == DENSE else 1)
    for row in sorted(rows, key=lambda row: row["share"]):
        first = row["share"] if row["share"] > 1.125 * first else first
        at = first, row["tokens"]
        if (row["exact"] or not exact) and (at not in best or worth(row) > worth(best[at])):
            best[at] = row
    return best


def here(device: str) -> str:
    """Return what rows that were timed on this machine say of `where`."""
    return f"yours, now, on {clock.device_name(torch.device(device))}"
