"""Every path of a feed-forward layer in a whole model: the drawn Llama of the paper's 2B shape, dense beside each path
that its weights allow, lossy ones with their error; and the small trained model that ships, where lossy paths have a
loss as well. The drawn model is taken three times: as drawn, with weights that are 2:4, and with weights of which nine
in ten blocks are empty, since some paths take such weights alone. What is compared has the same weights. One path takes
layers with thresholds on their inputs alone: these are put on (TEAL), and compared with the model without them."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import core
from ..core import TwellError
from ..layers.choice import LOSSY as SAID
from ..layers.choice import Choice
from ..layers.find import feed_forwards
from ..models.swap import sparsify
from ..models.thresholds import thresholds
from ..models.tiny import LanguageModel
from ..ops import clock
from ..sparsities.blocks import block_mask
from ..sparsities.two_four import two_four_mask
from ..training.text import source
from . import drawn, rows
from .causal import Causal
from .cut_checks import CutLayer, hard_inputs
from .rows import DENSE
from .workloads import FORCED, Clocks, Models, Tokens, Workload, decode, forward, right_ones, workload_rows

KEPT = "kept_inputs"  # of a model with thresholds
LOSSY = ("int8", "fp8", "twell_int8", "predicted", "experts", KEPT)
CUT = 0.5  # of the inputs of gate and up, and of the hidden values, zeroed by the thresholds
EMPTY = 0.9  # of the blocks of 32 x 32
_SECONDS = 1.0  # that a workload is timed on a CPU


@dataclass(frozen=True)
class Subject:
    """One model of the record: its name in rows and sections, the paths that are forced on a copy of it each, and how
    it is drawn (mask: as in drawn.fired), or that it is the trained one."""

    name: str
    paths: tuple[str, ...]
    mask: Callable[[Tensor], Tensor] | None = None
    trained: bool = False


SUBJECTS = (  # the last one takes longest, and is left out first where there is too little time
    Subject("trained small model", ("twell", *LOSSY), trained=True),
    Subject("drawn Llama with 2:4 weights", ("two_four",), two_four_mask),
    Subject("drawn Llama with empty blocks", ("blocks",), functools.partial(block_mask, sparsity=EMPTY, size=32)),
    Subject("drawn Llama", ("twell", "hot_cold", *LOSSY)),
)


def called(path: str) -> str:
    """Return what rows call the model that was forced onto this path."""
    return f"{FORCED}{path}{f', TEAL {CUT:.0%}' * (path == KEPT)}{f' ({SAID})' * (path in LOSSY)}"


def small() -> drawn.Shape:
    """A shape for a CPU."""
    return replace(
        drawn.shape_of("1M", "cpu"), layers=2, d_ff=1024, least=4.0, most=12.0, mean=8.0, sequences=4, cached=64
    )


class Measured:
    """A subject on a device, its copies and its workloads, made when they are first asked for and dropped for the next
    subject's: all at once would not fit.

    left_out: what did not run and why, by model, workload and path; a dict that is filled."""

    def __init__(self, shape: drawn.Shape, left_out: dict[str, str]) -> None:
        self.shape, self.left_out = shape, left_out
        self.device = torch.device(shape.device)
        self.held: dict[str, tuple[Models, list[Workload]]] = {}

    def of(self, subject: Subject) -> tuple[Models, list[Workload]]:
        """The models, and what they compute: steps of decoding at 1 and 16 sequences, one sequence, many."""
        if subject.name not in self.held:
            self.held.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.held[subject.name] = self._made(subject)
        return self.held[subject.name]

    @torch.no_grad()
    def _made(self, subject: Subject) -> tuple[Models, list[Workload]]:
        shape, dtype = self.shape, torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if subject.trained:
            model = LanguageModel.load(core.data_dir() / "checkpoints" / "small").to(self.device, dtype).eval()
            text = source.standard_library().split()[1].tokens.long()
            tokens, length, cached = Tokens(model.config.vocabulary, self.device, text), model.config.context, 64
            dense = Causal(model.requires_grad_(False))
        else:
            dense = Causal(drawn.fired(shape, dtype, mask=subject.mask))
            tokens, length, cached = Tokens(shape.vocabulary, self.device), shape.context, shape.cached
        models = Models(dense, tokens, subject.name, length)
        # Of a text with all logits, which have a loss; of drawn models those of the last token alone, since all logits
        # of many sequences would take more memory than the model.
        head = "all" if subject.trained else "last"
        works = [each for batch in (1, 16) for each in decode(tokens, dense, batch, cached, (True,))]
        works += [forward(tokens, count, length, head) for count in (1, shape.sequences)]
        works = [each.expect(models.exact) for each in works]
        models.exact = None
        for path in subject.paths:
            try:
                if path == KEPT:
                    _cut(models)
                else:
                    models.force(path, {each.tokens for each in works})
            except TwellError as error:
                self.left_out[f"{subject.name}, {path}"] = str(error)[:300]
        return models, works

    def rows(self, subject: Subject, at: int) -> list[dict]:
        """The rows of one workload, dense and on each path in turn; as CUDA graphs too on a GPU, unless there are very
        many tokens."""
        models, works = self.of(subject)
        paths = right_ones(models, works[at], models.sparse, self.left_out)
        clocks = Clocks(self.device, _SECONDS, graphs=works[at].tokens <= rows.LARGE)
        return workload_rows(models, works[at], [DENSE, *paths], clocks, self.left_out)


def _cut(models: Models) -> None:
    """Give `models` a copy of the dense model with thresholds, on the path that they allow.

    Raises clock.WrongResult where one of its layers computes something else, for a token, than densely with the same
    thresholds (bench.cut_checks)."""
    tokens, length = models.tokens, models.length
    seen = tokens.windows(tokens.PROFILED, drawn.windows_of(length), length)
    cut = thresholds(models.dense.model, [seen], CUT, method="teal").apply(copy.deepcopy(models.dense.model))
    sparse = sparsify(copy.deepcopy(cut), Choice(KEPT))
    for layer in feed_forwards(cut):
        x, swapped = models.inputs[layer.name][:1], sparse.get_submodule(layer.name)
        own, there = layer.down.weight, swapped.down.weight
        own.data = torch.empty_like(there).copy_(own)  # as it lies there: on a CPU torch adds in another order else
        ratio = CutLayer(layer).ratio(swapped, [x, *hard_inputs(layer, x)])
        if not ratio <= 1.0:
            raise clock.WrongResult(f"{layer.name} is off by {ratio:.3g} times what is allowed: nothing was timed")
    models.sparse[called(KEPT)] = Causal(sparse)
    models.judge(called(KEPT))


def sections(shape: drawn.Shape, left_out: dict[str, str]) -> rows.Sections:
    """The steps of the record, as in bench.inference: for each model its four workloads. left_out: as of Measured."""
    measured = Measured(shape, left_out)
    return {subject.name: [functools.partial(measured.rows, subject, at) for at in range(4)] for subject in SUBJECTS}
