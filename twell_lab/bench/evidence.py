"""Evidence that the simulator does what a GPU does: the same launches on both, with their outputs and memory accesses.

`cases()` and `counted()` list the launches. All inputs come from integer arithmetic, so every machine makes the same
ones. `outputs_record` and `counters_record` run the launches on a GPU (`twell-lab record gpu-outputs`, `gpu-counters`);
the ordinary tests run them in the simulator and compare.
"""

from __future__ import annotations

import base64
import csv
import shutil
import subprocess
import sys
import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import DeviceError, StackError
from ..formats.twell import TwELL
from ..records import Record
from .forward import NEWEST, launch

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


class Case(NamedTuple):
    """A portable kernel, all of whose versions are launched on these inputs (forward.launch)."""

    name: str
    kernel: str
    inputs: dict[str, Tensor]

    @property
    def versions(self) -> range:
        return range(1, NEWEST[self.kernel] + 1)

    def run(self, version: int, device: str = "cpu") -> Tensor:
        """Launch one version, on the CPU in the simulator, and return its output there."""
        y = launch(self.kernel, {name: t.to(device) for name, t in self.inputs.items()}, version)
        if self.kernel == "pack":  # words past the count are never written
            y = torch.where(torch.arange(y.shape[2], device=device) <= y[..., :1], y, 0)
        return y


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Pseudo-random numbers from -1 to 1, float64 of this shape: splitmix64 of each element's position, which gives the
    same numbers on every machine."""
    z = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    return (z.astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)


def _gate(rows: int, columns: int, density: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A gate before its ReLU, [rows, columns]; the share `density` of its values is positive."""
    size, draw = np.abs(noise((rows, columns), 1)) + 1e-3, (noise((rows, columns), 2) + 1) / 2
    return torch.from_numpy(np.where(draw < density, size, -size)).to(dtype)


def _adversarial(rows: int, columns: int) -> Tensor:
    """A gate with hard cases: row 0 has no positive value, row 1 only positive ones, row 2 has 31 and row 3 has 32 in
    the first tile; row 4 has NaN, infinities, -0 and denormal numbers."""
    gate = _gate(rows, columns, 0.04)
    gate[0], gate[1] = -1.0, gate[1].abs()
    gate[2:4, :256] = -1.0
    gate[2, 5:36], gate[3, 5:37] = 0.5, 0.25
    odd = [torch.nan, torch.inf, -0.0, 1e-41, 6e-8, -torch.inf]
    gate[4, 7 : 7 + 2 * len(odd) : 2] = torch.tensor(odd).to(gate.dtype)
    return gate


def _weights(rows: int, d_model: int, d_ff: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    shapes = {"x": (rows, d_model), "up": (d_ff, d_model), "down_t": (d_ff, d_model)}
    shapes |= {"up_bias": (d_ff,), "down_bias": (d_model,)}
    return {name: torch.from_numpy(noise(shape, 10 + i)).to(dtype) for i, (name, shape) in enumerate(shapes.items())}


def cases() -> list[Case]:
    """Three small cases with odd values, full and overflowing tiles, for comparing outputs bit by bit."""
    two_warps = _weights(5, 1032, 300)
    two_warps["x"][4, 3] = torch.inf  # as in the dense layer, this makes the whole row of the output NaN
    finite = _adversarial(5, 300).nan_to_num(1.0, 2.0, -2.0)
    two_warps |= {"packed": TwELL.from_gate(finite).packed, "gate": finite}
    wide, p = _weights(5, 260, 300, torch.float32), TwELL.from_gate(finite.float())
    from_tail = {name: wide[name] for name in ("down_t", "down_bias")}
    from_tail |= {name: getattr(p, name) for name in ("packed", "tail_pointer", "tail_column", "tail_value")}
    return [
        Case("pack, bf16, odd values and full tiles", "pack", {"gate": _adversarial(7, 520)}),
        Case("gated, bf16, two warps a token, overflow from the gate", "gated", two_warps),
        Case("down, fp32, overflow from the tail", "down", from_tail),
    ]


def counted() -> list[Case]:
    """Every version of the portable kernels at two sizes whose memory accesses are counted: one where a warp computes a
    token, one where two do."""
    made = []
    for tokens, d_model, d_ff in ((64, 256, 1024), (8, 2048, 512)):
        gate = _gate(tokens, d_ff, 0.05)
        given = {name: t for name, t in _weights(tokens, d_model, d_ff).items() if "bias" not in name}
        given |= {"packed": TwELL.from_gate(gate).packed, "gate": gate}
        name = f"{tokens} tokens, d_model {d_model}, d_ff {d_ff}, 5% firing, bf16"
        made += [Case(name, kernel, given) for kernel in NEWEST]
    return made


def counts_of(counts) -> dict[str, int]:
    """The counts of a simulated launch (simulator.Counts) under the names of COUNTERS."""
    names = {name: name.split("_") for name in COUNTERS}
    return {name: getattr(getattr(counts, f"{space}_{way}s"), unit) for name, (space, way, unit) in names.items()}


# ---- recording, on a GPU ----


def encode(t: Tensor) -> dict:
    """Return a tensor as a dict that JSON takes, with its bytes compressed."""
    data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    packed = base64.b64encode(zlib.compress(data, 9)).decode()
    return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "zlib": packed}


def decode(found: dict) -> Tensor:
    """Return the tensor, on the CPU, of which `encode` made this dict."""
    data = bytearray(zlib.decompress(base64.b64decode(found["zlib"])))
    return torch.frombuffer(data, dtype=getattr(torch, found["dtype"])).reshape(found["shape"])


def outputs_record() -> Record:
    """Return the outputs of `cases()` on this GPU. Raises DeviceError without a GPU."""
    need_gpu()
    rows = [
        {
            "case": case.name,
            "kernel": case.kernel,
            "outputs": {str(v): encode(case.run(v, "cuda")) for v in case.versions},
        }
        for case in cases()
    ]
    return Record.new("gpu-outputs", "what the portable kernels make of three small inputs, bit by bit", rows)


def counters_record() -> Record:
    """Return what ncu counts in each launch of `counted()` on this GPU. StackError without ncu."""
    need_gpu()
    if not (ncu := shutil.which("ncu")):
        raise StackError("gpu-counters needs ncu (Nsight Compute) on the PATH; it comes with the CUDA toolkit")
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", "regex:^(pack|down|gated)_v", "--metrics", ",".join(COUNTERS.values())]
    code = "from twell_lab.bench import evidence; [c.run(v, 'cuda') for c in evidence.counted() for v in c.versions]"
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        raise DeviceError(f"ncu counted nothing (exit status {done.returncode}): {(done.stdout + done.stderr)[-2000:]}")
    seen = list(csv.DictReader(lines[start:]))[1:]  # the first row holds the units
    rows = [
        {"kernel": f"{case.kernel}_v{version}", "version": version, "case": case.name}
        for case in counted()
        for version in case.versions
    ]
    names = [line["Kernel Name"].split("(")[0] for line in seen]
    if names != [row["kernel"] for row in rows]:
        raise DeviceError(f"ncu saw the launches {names}, not one of each version")
    for row, line in zip(rows, seen):
        row |= {ours: int(line[theirs].replace(",", "")) for ours, theirs in COUNTERS.items()}
    purpose = "memory accesses of the portable kernels as the hardware counts them"
    return Record.new("gpu-counters", purpose, rows, kernels=("smxx_pack", "smxx_down", "smxx_gated"))


def need_gpu() -> None:
    """Raises DeviceError without a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("this recording needs an NVIDIA GPU that torch can use; `twell-lab doctor` says what is here")
