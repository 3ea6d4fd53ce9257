"""Evidence that the simulator does what a GPU does: the same launches on both, with their outputs and memory accesses.

`cases()` and `counted()` list the launches. All inputs come from integer arithmetic, so every machine makes the same
ones. `outputs_record` and `counters_record` run the launches on a GPU (`twell-lab record gpu-outputs`, `gpu-counters`);
the ordinary tests run them in the simulator and compare.
"""

from __future__ import annotations

import base64
import csv
import io
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core import DeviceError, StackError
from ..cuda.launch import run
from ..formats.twell import TwELL
from ..ops.down import down
from ..ops.gated import gated
from ..ops.pack import pack
from ..records import Record

COUNTERS = {  # our name for a count: the profiler's
    "global_read_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global_read_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_write_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global_write_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared_read_requests": "smsp__inst_executed_op_shared_ld.sum",
    "shared_read_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_write_requests": "smsp__inst_executed_op_shared_st.sum",
    "shared_write_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}

UTILISATION = {  # in percent of what each part of the GPU could have done while the kernel ran
    "issue_slots_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l1_data_pipe_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l1_hits_percent": "l1tex__t_sector_hit_rate.pct",
    "l2_percent": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "device_memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}


@dataclass(frozen=True)
class Case:
    """One kernel at one size, with the versions to launch. `run(tensors, version)` launches one on the tensors' device
    and returns its output."""

    name: str
    kernel: str
    versions: tuple[int, ...]
    inputs: dict[str, Tensor]
    run: Callable[[dict[str, Tensor], int], Tensor]


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Pseudo-random numbers from -1 to 1, float64 of this shape: splitmix64 of each element's position, which gives the
    same numbers on every machine."""
    z = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    return (z.astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)


def _gate(rows: int, columns: int, density: float, dtype: torch.dtype) -> Tensor:
    """A gate before its ReLU, [rows, columns]; the share `density` of its values is positive."""
    size, draw = np.abs(noise((rows, columns), 1)) + 1e-3, (noise((rows, columns), 2) + 1) / 2
    return torch.from_numpy(np.where(draw < density, size, -size)).to(dtype)


def _adversarial(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A gate with hard cases: row 0 has no positive value, row 1 only positive ones, row 2 has 31 and row 3 has 32 in
    the first tile; row 4 has NaN, infinities, -0 and denormal numbers."""
    gate = _gate(rows, columns, 0.04, dtype)
    gate[0], gate[1] = -1.0, gate[1].abs()
    gate[2:4, :256] = -1.0
    gate[2, 5:36], gate[3, 5:37] = 0.5, 0.25
    odd = [torch.nan, torch.inf, -0.0, 1e-41, 6e-8, -torch.inf]
    gate[4, 7 : 7 + 2 * len(odd) : 2] = torch.tensor(odd).to(dtype)
    return gate


def _weights(dtype: torch.dtype, rows: int, d_model: int, d_ff: int) -> dict[str, Tensor]:
    shapes = {
        "x": (rows, d_model),
        "up": (d_ff, d_model),
        "down_t": (d_ff, d_model),
        "up_bias": (d_ff,),
        "down_bias": (d_model,),
    }
    return {name: torch.from_numpy(noise(shape, 10 + i)).to(dtype) for i, (name, shape) in enumerate(shapes.items())}


def _packed(gate: Tensor, tail: bool) -> dict[str, Tensor]:
    """Return what the layer kernels read: the TwELL words and, for values that do not fit, the tail or the dense
    gate."""
    p = TwELL.from_gate(gate)
    if not tail:
        return {"packed": p.packed, "gate": gate}
    return {
        "packed": p.packed,
        "tail_pointer": p.tail_pointer,
        "tail_column": p.tail_column,
        "tail_value": p.tail_value,
    }


def _tail(t: dict[str, Tensor]) -> tuple:
    return tuple(t.get(name) for name in ("tail_pointer", "tail_column", "tail_value"))


def _run_pack(t: dict[str, Tensor], version: int) -> Tensor:
    packed = run(pack, t["gate"], 256, 32, version)
    slots = torch.arange(packed.shape[2], device=packed.device)
    return torch.where(slots <= packed[..., :1], packed, 0)  # words past the count are never written


def _run_down(t: dict[str, Tensor], version: int) -> Tensor:
    weights = (t["down_t"], t.get("down_bias"), t["down_t"].shape[0])
    return run(down, t["packed"], t.get("gate"), _tail(t), *weights, 256, version)


def _run_gated(t: dict[str, Tensor], version: int) -> Tensor:
    weights = (t["up"], t["down_t"], t.get("up_bias"), t.get("down_bias"))
    return run(gated, t["x"], t["packed"], t.get("gate"), _tail(t), *weights, 256, version)


_ALL = (("pack", (1, 2, 3, 4), _run_pack), ("down", (1, 2, 3), _run_down), ("gated", (1, 2, 3, 4), _run_gated))


def _every_version(name: str, inputs: dict[str, Tensor]) -> list[Case]:
    """All versions of the three portable kernels on the same inputs."""
    return [Case(name, kernel, versions, inputs, run) for kernel, versions, run in _ALL]


def cases() -> list[Case]:
    """Three small cases with odd values, full and overflowing tiles, for comparing outputs bit by bit."""
    gate = _adversarial(7, 520, torch.bfloat16)
    two_warps = _weights(torch.bfloat16, 5, 1032, 300)
    two_warps["x"][4, 3] = torch.inf  # as in the dense layer, this makes the whole row of the output NaN
    finite = _adversarial(5, 300, torch.bfloat16).nan_to_num(1.0, 2.0, -2.0)
    wide = _weights(torch.float32, 5, 260, 300)
    second_half = {name: wide[name] for name in ("down_t", "down_bias")}
    return [
        Case("pack, bf16, odd values and full tiles", "pack", (1, 2, 3, 4), {"gate": gate}, _run_pack),
        Case(
            "gated, bf16, two warps a token, overflow from the gate",
            "gated",
            (1, 2, 3, 4),
            {**two_warps, **_packed(finite, tail=False)},
            _run_gated,
        ),
        Case(
            "down, fp32, overflow from the tail",
            "down",
            (1, 2, 3),
            {**second_half, **_packed(finite.float(), tail=True)},
            _run_down,
        ),
    ]


def counted() -> list[Case]:
    """Every version of the portable kernels at two sizes whose memory accesses are counted: one where a warp computes a
    token, one where two do."""
    found = []
    for tokens, d_model, d_ff in ((64, 256, 1024), (8, 2048, 512)):
        t = _weights(torch.bfloat16, tokens, d_model, d_ff)
        del t["up_bias"], t["down_bias"]
        t |= _packed(_gate(tokens, d_ff, 0.05, torch.bfloat16), tail=False)
        found += _every_version(f"{tokens} tokens, d_model {d_model}, d_ff {d_ff}, 5% firing, bf16", t)
    return found


def counts_of(counts) -> dict[str, int]:
    """The counts of a simulated launch (simulator.Counts) under the names of COUNTERS."""
    return {
        "global_read_requests": counts.global_reads.requests,
        "global_read_sectors": counts.global_reads.sectors,
        "global_write_requests": counts.global_writes.requests,
        "global_write_sectors": counts.global_writes.sectors,
        "shared_read_requests": counts.shared_reads.requests,
        "shared_read_wavefronts": counts.shared_reads.wavefronts,
        "shared_write_requests": counts.shared_writes.requests,
        "shared_write_wavefronts": counts.shared_writes.wavefronts,
    }


# ---- recording, on a GPU ----


def encode(t: Tensor) -> dict:
    """A tensor as a dict that JSON can hold: its dtype, its shape, and its bytes, compressed."""
    data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(t.dtype).removeprefix("torch."),
        "shape": list(t.shape),
        "zlib": base64.b64encode(zlib.compress(data, 9)).decode(),
    }


def decode(found: dict) -> Tensor:
    """The tensor, on the CPU, of which `encode` made this dict."""
    data = bytearray(zlib.decompress(base64.b64decode(found["zlib"])))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, found["dtype"])).reshape(found["shape"])


def outputs_record() -> Record:
    """The inputs and outputs of `cases()` on this GPU. Raises DeviceError without a GPU."""
    need_gpu()
    rows = []
    for case in cases():
        here = {name: t.cuda() for name, t in case.inputs.items()}
        outputs = {str(v): encode(case.run(here, v)) for v in case.versions}
        rows.append(
            {
                "case": case.name,
                "kernel": case.kernel,
                "outputs": outputs,
                "inputs": {name: encode(t) for name, t in case.inputs.items()},
            }
        )
    return Record.new("gpu-outputs", "what the portable kernels make of three small inputs, bit by bit", rows)


def large() -> list[Case]:
    """Every version of the portable kernels on the workload that `bench.kernel_versions` times, on this GPU."""
    from ..ops import clock

    dense, (x, *_) = clock.workload(16384, 2048, 5632, 29, "lognormal", torch.bfloat16, "cuda")
    gate = torch.nn.functional.linear(x, dense.gate_proj.weight)
    t = {
        "x": x,
        "gate": gate,
        "packed": run(pack, gate, 256, 32),
        "up": dense.up_proj.weight.detach(),
        "down_t": dense.down_proj.weight.detach().t().contiguous(),
    }
    return _every_version("16,384 tokens, d_model 2048, d_ff 5632, mean nnz 29, bf16", t)


def counters_record() -> Record:
    """Return what the profiler ncu counts in each launch of `counted()` and `large()` on this GPU.

    Raises DeviceError without a GPU, StackError without ncu."""
    need_gpu()
    rows = _profiled(counted, COUNTERS, int) + _profiled(large, UTILISATION, float)
    return Record.new(
        "gpu-counters",
        "memory accesses of the portable kernels as the hardware counts them",
        rows,
        kernels=("smxx_pack", "smxx_down", "smxx_gated"),
    )


def _profiled(listed: Callable[[], list[Case]], metrics: dict[str, str], number: type) -> list[dict]:
    """A row for each launch that `listed`, a function of this module, lists, with these metrics of ncu as numbers."""
    if not (ncu := shutil.which("ncu")):
        raise StackError("gpu-counters needs ncu (Nsight Compute) on the PATH; it comes with the CUDA toolkit")
    command = [
        ncu,
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--kernel-name",
        "regex:^(pack|down|gated)_v",
        "--metrics",
        ",".join(metrics.values()),
        sys.executable,
        "-c",
        f"from twell_lab.bench import evidence; evidence.run_all(evidence.{listed.__name__}())",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        raise DeviceError(f"ncu counted nothing (exit status {done.returncode}): {(done.stdout + done.stderr)[-2000:]}")
    found = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]  # the first row holds the units
    launches = [(case, v) for case in listed() for v in case.versions]
    found = found[-len(launches) :]  # preparing the inputs of `large` launches pack once before
    if [row["Kernel Name"].split("(")[0] for row in found] != [f"{case.kernel}_v{v}" for case, v in launches]:
        raise DeviceError(f"ncu saw the launches {[row['Kernel Name'] for row in found]}, not one of each version")
    return [
        {
            "kernel": f"{case.kernel}_v{v}",
            "version": v,
            "case": case.name,
            **{ours: number(row[theirs].replace(",", "")) for ours, theirs in metrics.items()},
        }
        for (case, v), row in zip(launches, found)
    ]


def run_all(found: list[Case]) -> None:
    """Launch each version of each case once on the GPU, in order, where ncu counts them for `counters_record`."""
    for case in found:
        here = {name: t.cuda() for name, t in case.inputs.items()}
        for v in case.versions:
            case.run(here, v)
    torch.cuda.synchronize()


def need_gpu() -> None:
    """Raises DeviceError without a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("this recording needs an NVIDIA GPU that torch can use; `twell-lab doctor` says what is here")
