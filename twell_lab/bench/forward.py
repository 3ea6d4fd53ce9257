"""One layer's forward pass, dense beside sparse: checked first, then timed (ops.clock)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..core import InputError
from ..cuda.launch import layout, run
from ..formats.twell import TILE, WORDS
from ..layers.find import feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock, dispatch, gate_pack
from ..ops.clock import ROTATED, WrongResult, workload
from ..ops.down import down
from ..ops.gated import gated
from ..ops.pack import pack
from ..plots import OTHER_KERNELS
from ..records import Record
from .rows import COMPILED, DENSE, check, clock_gpu, describe, first_projection, over, row, table


def _check_seconds(seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 2**31:
        raise InputError(f"seconds is {seconds!r:.80}; a finite number from 0 up is accepted")


def ffn(
    tokens: int = 16384,
    d_model: int = 2048,
    d_ff: int = 5632,
    nnz: float = 29,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    workload_kind: str = "lognormal",
    compiled: bool = False,
    others: bool = False,
    seconds: float = 2.0,
    seed: int = 0,
) -> Record:
    """Time a gated layer of the given size on a drawn workload, dense beside sparse.

    Args:
        tokens, d_model, d_ff: the sizes of the input and of the layer.
        nnz: how many neurons fire at a token, on average.
        dtype: bfloat16, float16 or float32; by default bfloat16 on a GPU, float16 on one that is older than
            it (below sm_80), float32 on a CPU.
        device: by default a GPU where there is one.
        workload_kind: "lognormal" or "uniform": how often single neurons fire (ops.clock.firing_rates).
        compiled: also time torch.compile of the dense layer.
        others: on a GPU, also time the layer on kernels that are not picked there (paths "portable" and "mma.sync").
        seconds: how long to measure on a CPU.
        seed: of the workload.

    Returns:
        A Record with a row for each path, times in milliseconds.

    Raises:
        InputError, DeviceError: for a size, nnz, dtype or device that is not accepted.
        WrongResult: where a result does not agree with float64; then nothing is timed.
    """
    _check_seconds(seconds)
    device = clock.present_device(device)
    dtype = dtype or clock.dtype_for(device)
    dense, inputs = workload(tokens, d_model, d_ff, nnz, workload_kind, dtype, device, seed=seed)
    return _compare(dense, inputs, f"independent, {workload_kind}", compiled=compiled, others=others, seconds=seconds)


def layer(
    module: nn.Module, x: Tensor, *, label: str = "trained", compiled: bool = False, seconds: float = 2.0
) -> Record:
    """Time a feed-forward module on real inputs x [tokens, d_model], dense beside its SparseFFN.

    label: what the rows call this workload. compiled, seconds, the Record and the errors: as for `ffn`."""
    _check_seconds(seconds)
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] == 0:
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x is {shape}; a tensor [tokens, d_model] with at least one token is accepted")
    return _compare(module, [x], label, compiled=compiled, seconds=seconds)


@torch.no_grad()
def _compare(
    dense: nn.Module, inputs: list[Tensor], label: str, *, compiled: bool, seconds: float, others: bool = False
) -> Record:
    x = inputs[0]
    found = feed_forwards(dense)[0]
    if found.module is not dense:
        raise InputError(f"{type(dense).__name__} holds a feed-forward layer, {found.name}: that module is accepted")
    if isinstance(dense, SparseFFN):
        raise InputError(f"{type(dense).__name__} is no feed-forward layer as it was; a dense one is accepted")
    weight = found.pattern.weight
    if (x.dtype, x.device, x.shape[1]) != (weight.dtype, weight.device, weight.shape[1]):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}; {weight.dtype} [tokens, {weight.shape[1]}] on "
            f"{weight.device} is accepted"
        )
    # A copy, whose weights may lie as the sparse path reads them; `check` compares the two on these inputs.
    sparse = SparseFFN(copy.deepcopy(found.module).eval(), probed=found.both)
    worst = check(dense, sparse, inputs, every_row=False)
    shared = describe("ffn_forward", inputs, found.pattern.weight, label, found.pattern.bias)
    shared["error_over_allowed"] = round(worst, 4)
    calls = {DENSE: over(dense, inputs), "twell": over(sparse, inputs)}
    if others and x.is_cuda:
        calls |= {name: over(call, inputs) for name, call in _other_kernels(dense, sparse, inputs).items()}
    if compiled:
        torch._dynamo.reset()
        calls[COMPILED] = over(torch.compile(dense), inputs)
    if not x.is_cuda:
        samples = clock.time_cpu(calls, seconds / 2)
        samples |= {f"{name} (cold)": each for name, each in clock.time_cpu(calls, seconds / 2, cold=True).items()}
        rows = [each | _on_the_wall(each) for each in table(shared, samples)]
    else:
        with torch.cuda.device(x.device):
            samples, bursts = clock_gpu(calls, x.shape[0], parts=_parts(sparse, inputs))
            memory = {name: {"peak_bytes": clock.peak_bytes(call)} for name, call in calls.items()}
        rows = [each | memory.get(each["path"], {}) for each in table(shared, samples, bursts=bursts)]
    return Record.new("ffn", "one feed-forward layer, dense beside sparse", rows)


def _on_the_wall(row: dict) -> dict:
    """Wall and host time of a row of the CPU, which has one clock."""
    return {"wall_ms": row["ms"], "dense_wall_ms": row["dense_ms"], "host_us": 1e3 * row["ms"]}


def _other_kernels(dense: nn.Module, sparse: SparseFFN, inputs: list[Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layer on kernels that dispatch may not pick on this GPU, each checked: the portable ones behind torch's gate
    GEMM; and, on Hopper, where the kernels after them can run too, those whose gate GEMM packs through mma.sync."""
    weights = sparse.weights()
    first, _ = first_projection(weights.gate, weights.up)

    def after_torch(x):
        return dispatch.portable(x, *weights, sparse.tile, sparse.words)

    def through_mma(x):
        return dispatch.sm90(x, *weights, 0, packs=gate_pack.gate_pack_sm80)

    found = {OTHER_KERNELS[0]: after_torch}
    able, x = torch.cuda.get_device_capability(inputs[0].device), layout(inputs[0])
    takes = gate_pack.takes_sm80(able, x, layout(first))
    if (sparse.tile, sparse.words) == (TILE, WORDS) and takes and dispatch.fuses(first):
        found[OTHER_KERNELS[1]] = through_mma
    for call in found.values():
        check(dense, call, inputs[:1], every_row=False)
    return found


def _parts(sparse: SparseFFN, inputs: list[Tensor]) -> dict[str, Callable[[int], object]]:
    """The three launches of the portable forward, each by itself, on the real output of the one before."""
    pattern, up, last = sparse.up if sparse.gate is None else sparse.gate, sparse.up, sparse.down
    gates = [linear(x, pattern.weight, pattern.bias) for x in inputs]
    packs = [run(pack, g, sparse.tile, sparse.words) for g in gates]
    none, down_t = (None, None, None), last.weight.t()

    def project(turn):
        return linear(inputs[turn % len(inputs)], pattern.weight, pattern.bias)

    def packed(turn):
        return run(pack, gates[turn % len(inputs)], sparse.tile, sparse.words)

    def rest(turn):
        i = turn % len(inputs)
        if sparse.gate is None:
            return run(down, packs[i], gates[i], none, down_t, last.bias, len(down_t), sparse.tile)
        weights = (up.weight, down_t, up.bias, last.bias)
        return run(gated, inputs[i], packs[i], gates[i], none, *weights, sparse.tile)

    return {"part: gate GEMM": project, "part: pack": packed, "part: sparse": rest}


@torch.no_grad()
def kernel_versions(
    tokens: int = 16384,
    d_model: int = 2048,
    d_ff: int = 5632,
    nnz: float = 29,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> list[dict]:
    """Rows of kind "kernel": every version of every portable kernel on one workload, in 16 bits, on this GPU.

    Each version is first compared with the newest one, which `check` has compared with float64.
    """
    dense, inputs = workload(tokens, d_model, d_ff, nnz, "lognormal", dtype, "cuda", seed=seed)
    sparse = SparseFFN.from_module(copy.deepcopy(dense).eval())
    check(dense, sparse, inputs[:1], every_row=False)
    gates = [linear(x, sparse.gate.weight) for x in inputs]
    packs = [run(pack, g, TILE, WORDS) for g in gates]
    none, down_t, up = (None, None, None), sparse.down.weight.t(), sparse.up.weight
    arguments = {
        pack: [(g, TILE, WORDS) for g in gates],
        down: [(packed, g, none, down_t, None, d_ff, TILE) for packed, g in zip(packs, gates)],
        gated: [(x, packed, g, none, up, down_t, None, None, TILE) for x, packed, g in zip(inputs, packs, gates)],
    }

    def call(operation, version, turn):
        return run(operation, *arguments[operation][turn % ROTATED], version)

    newest = {pack: 4, down: 3, gated: 4}
    calls = {f"{op.__name__}_v{v}": partial(call, op, v) for op in newest for v in range(1, newest[op] + 1)}
    for op in (down, gated):  # a kernel leaves words past a count unwritten: the tests compare packed tensors
        best = call(op, newest[op], 0).float()
        for v in range(1, newest[op]):
            if (off := float((call(op, v, 0).float() - best).norm() / best.norm())) > 0.01:
                name, right = f"{op.__name__}_v{v}", f"v{newest[op]}"
                raise WrongResult(f"{name} differs from {right} by {off:.3g} of its norm: nothing was timed")
    shared = describe("kernel", inputs, sparse.gate.weight, "independent, lognormal") | {"nnz": nnz}
    return [row(shared, path, samples) for path, samples in clock.time_cuda(calls).items()]
