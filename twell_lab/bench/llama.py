"""The record of a whole model: a drawn Llama of the paper's 2B shape, dense, as planned for eager calls, and as planned
for CUDA graphs. Beside rows of twell_lab.bench.workloads there are those of kind "model_plan": how long a plan took."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import nn

from ..analysis.costs import measure_rates
from ..layers.choice import STEP, one_of_each
from ..layers.find import feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock
from . import drawn, rows
from .causal import Causal, Head
from .drawn import LLAMA, Shape
from .rows import COMPILED, DENSE
from .workloads import (
    COMPILED_TOO,
    FOR_GRAPHS,
    PLANNED,
    Clocks,
    Models,
    Tokens,
    Workload,
    decode,
    forward,
    workload_rows,
)

CLASSES = (1, 16, 256, 2048, 131072)  # of token counts, for which the model is planned
PLANS = PLANNED, FOR_GRAPHS
ENERGY = 4.0  # seconds, as Clocks takes them: of many sequences, and of a step of decoding as a graph
GPU = torch.device("cuda")
# Samples of calls whose time is the host's, which varies from call to call, and of those that take a second.
MANY, FEW = 25, 3


def recorded(shape: Shape, about: str = "Llama", classes: Sequence[int] = CLASSES) -> Models:
    """The drawn model of the record, planned for these numbers of tokens, eager and for graphs. How long a plan takes
    is recorded too: so all kernels are compiled before. about: what rows call it."""
    dense = Causal(drawn.fired(shape))
    models = Models(dense, Tokens(shape.vocabulary, torch.device(shape.device)), about, shape.context)
    _compile_all(shape, dense.model, classes)
    for name in PLANS:
        models.plan(classes, for_graphs=name == FOR_GRAPHS)
    return models


def _compile_all(shape: Shape, dense: nn.Module, classes: Sequence[int]) -> None:
    """Compile the kernels, as happens once on a machine. There are decode kernels for each power of two of tokens."""
    if shape.device == "cuda":
        measure_rates(shape.device, torch.bfloat16)
    with torch.no_grad():
        for choice in one_of_each(shape.d_ff, STEP):
            layer = SparseFFN.from_module(copy.deepcopy(feed_forwards(dense)[0].module), plan=choice)
            for tokens in sorted({*classes, *(2**n for n in range(12))}):
                layer(torch.zeros(tokens, shape.d_model, dtype=torch.bfloat16, device=shape.device))


def plan_rows(models: Models) -> list[dict]:
    """Return how long `twell_lab.plan` took for the classes CLASSES, from a profile on."""
    shared = models.shared("model_plan", max(CLASSES), f"plan of {len(CLASSES)} token classes")
    named = {PLANNED: "plan", FOR_GRAPHS: "plan for graphs"}
    return [
        rows.row(shared, named[path], [1e3 * seconds], classes=list(CLASSES))
        for path, seconds in models.seconds.items()
    ]


def prefill_rows(
    models: Models, sequences: int, *, head: Head = "last", compiled: bool = False, graphs: bool = False
) -> list[dict]:
    """The model on `sequences` of whole length, which gives the logits of the last token, or what `head` says: eager;
    with `graphs` also as a CUDA graph, and the model that is planned for these; or, compiled, the rows of the compiled
    models alone."""
    work = forward(models.tokens, sequences, models.length, head)
    paths = [DENSE, COMPILED, PLANNED + COMPILED_TOO] if compiled else [DENSE, *(PLANS if graphs else (PLANNED,))]
    many = sequences > 1
    clocks = _Clocks(GPU, ENERGY if many else 0.0, graphs=graphs, rounds=FEW if many else MANY, watched=many)
    clocks.of = paths[1:] if compiled else paths  # whose rows are kept
    found = workload_rows(models, _expected(models, work), paths, clocks)
    return [row for row in found if "compiled" in row["path"]] if compiled else found


def decode_rows(models: Models, batch: int, cached: int, *, head: bool = True, compiled: bool = False) -> list[dict]:
    """A step of decoding, with the LM head or without it: eager, and the whole step as one CUDA graph; or, compiled,
    the same rows of the compiled models alone."""
    work = _expected(models, *decode(models.tokens, models.dense, batch, cached, (head,)))
    paths = [DENSE, COMPILED, FOR_GRAPHS + COMPILED_TOO] if compiled else [DENSE, *PLANS]
    clocks = _Clocks(GPU, ENERGY, graphs=True, compiled=compiled, rounds=MANY, watched=True)
    clocks.of = paths[1:] if compiled else paths
    found = workload_rows(models, work, paths, clocks)
    return [row for row in found if "compiled" in row["path"]] if compiled else found


class _Clocks(Clocks):
    """Clocks that read the energy of these paths (`of`) where they keep the GPU busy: in forwards of many tokens, and
    in steps of decoding as graphs."""

    of: list[str] = []

    def reads_energy(self, path: str, tokens: int) -> bool:
        return path.removesuffix(" (graph)") in self.of and (tokens > clock.GRAPH_TOKENS or path.endswith("(graph)"))


@torch.no_grad()
def _expected(models: Models, work: Workload) -> Workload:
    return work.expect(models.exact)


def sections(shape: Shape = LLAMA) -> rows.Sections:
    """The steps of the record, as in bench.inference; the models are made when the first step needs them."""
    models = functools.cache(lambda: recorded(shape))
    return {
        "plan": [lambda: plan_rows(models())],
        "one sequence": [lambda: prefill_rows(models(), 1, graphs=True)],
        "decode": [
            functools.partial(lambda batch: decode_rows(models(), batch, shape.cached), batch) for batch in (1, 16)
        ],
        "many sequences": [lambda: prefill_rows(models(), shape.sequences)],
        "decode, compiled": [
            functools.partial(lambda batch: decode_rows(models(), batch, shape.cached, compiled=True), batch)
            for batch in (1, 16)
        ],
        "many sequences, compiled": [lambda: prefill_rows(models(), shape.sequences, compiled=True)],
        "one sequence, compiled": [lambda: prefill_rows(models(), 1, compiled=True)],
    }
