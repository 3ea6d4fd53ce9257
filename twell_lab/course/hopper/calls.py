"""What a plain call costs the host, for notebook 09: as recorded, and in a small model.

Data in, data out, nothing drawn. Rows are those of the "host-time" record (twell_lab.bench.training): `ms` is the time
until the call returns (the host's), `wall_ms` the time until its result is there. Each has `where`, as in `data`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..recorded import newest

NAME, KIND = "host-time", "host"
FORWARD = "forward"  # the workload of the rows without gradients
DENSE, SPARSE = "dense eager", "twell"  # the paths compared


def recorded(device: str = "H100") -> list[dict]:
    """The rows of calls without gradients of "host-time" records made on a GPU with `device` in its name; of equal
    measurements the newest."""
    return newest(NAME, device, lambda row: row.get("kind") == KIND and row["workload"] == FORWARD)


def summary(rows: list[dict]) -> str:
    """Return how much of the wall time of TwELL's call the host takes, with the fewest and the most tokens, in a
    sentence."""
    mine = sorted((row for row in rows if row["path"] == SPARSE), key=lambda row: row["tokens"])
    if not mine:
        return (
            "No host times are recorded in this checkout; on a machine with a GPU, `twell-lab record host-time` does."
        )
    few, many = (f"{row['ms'] / row['wall_ms']:.0%}" for row in (mine[0], mine[-1]))
    counts = [f"{row['tokens']:,}" for row in (mine[0], mine[-1])]
    return f"TwELL's call returns after {few} of its time ({counts[0]} token), {many} ({counts[1]})."


def timeline(launch: float, kernels: Sequence[float]) -> tuple[float, float]:
    """When a call returns, and when its result is there, in microseconds from its start.

    launch: how long the host takes for each launch. kernels: how long each takes on the GPU; one starts when it has
    been launched and the one before it has ended."""
    done: float = 0
    for number, kernel in enumerate(kernels, 1):
        done = max(done, number * launch) + kernel
    return len(kernels) * launch, done
