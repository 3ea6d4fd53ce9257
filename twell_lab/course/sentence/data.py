"""What small models do with a sentence when more and more of their neurons are cut, all of it computed when the
sentence is read (`read`), so that a slider only looks it up (`view`). A cut of 90% leaves a layer one value in ten over
the sentence: a threshold sets the others to zero (CATS, arXiv 2404.08763). Where a ReLU silences more by itself, it
changes nothing. Needs no plotly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ... import core, records
from ...core import InputError
from ...layers.lossy import zeroed
from ...layers.sparse_ffn import SparseFFN
from ...models.generate import generate
from ...models.tiny import LanguageModel
from ...ops import clock as clocks
from ..recorded import ms  # noqa: F401

CUTS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
SENTENCE = "It was late, and the rain fell upon the roof of the old house."
MOST, NEW = 64, 60  # tokens that are read of a sentence, and that are written after it
SIZE = (2048, 5632)  # d_model and d_ff of the layer that is timed: the shipped models' own are too small to gain time
ACROSS = 128  # neurons in a line of the map
SHARES = (0.002, 0.03, 0.125)  # of its neurons, that fire where it is timed


class Row(NamedTuple):
    """How long a layer of SIZE takes for one token, milliseconds: with this share of its neurons firing, and dense."""

    where: str
    share: float
    ms: float
    dense_ms: float


@dataclass(frozen=True, eq=False)
class Read:
    """What one model did with a sentence, at each of CUTS. kept: who fires, bool [cuts, tokens, layers, d_ff]. loss:
    bits a token. texts: what it writes after it. row: bytes of a neuron's weights in one matrix. matrices: whose rows a
    neuron needs once it fires."""

    kept: np.ndarray
    loss: list[float]
    texts: list[str]
    row: int
    matrices: int


@dataclass(frozen=True, eq=False)
class Sentence:
    """What models did with a sentence, by name. tokens: what was read, a byte each. note: a line on what was left out,
    or ""."""

    readers: dict[str, LanguageModel]
    tokens: bytes
    note: str
    models: dict[str, Read]


def shipped() -> dict[str, LanguageModel]:
    """The models of data/checkpoints, by the L1 of their training: the twins "l1-free" and "sparse", which differ in
    nothing else; in an installed package, which has neither, their smaller twins."""
    folder, twins = core.data_dir() / "checkpoints", {"0": "l1-free", "4e-4": "sparse"}
    if not all((folder / name).is_dir() for name in twins.values()):
        twins = {"0": "l1-free-small", "1e-3": "sparse-small"}
    return {f"L1 {l1}": LanguageModel.load(folder / name) for l1, name in twins.items()}


def read(models: dict[str, LanguageModel], text: str = SENTENCE) -> Sentence:
    """Have models of bytes read a sentence; a copy of each does, on the CPU. InputError for a sentence that can't be
    read."""
    tokens, note = _tokens(text)
    readers = {name: copy.deepcopy(model).cpu().eval() for name, model in models.items()}
    return Sentence(readers, tokens, note, {name: _read(model, tokens) for name, model in readers.items()})


def _tokens(text: str) -> tuple[bytes, str]:
    """Return a sentence as the bytes that models read, and a line on what is not as it was typed."""
    try:
        tokens = text.strip().encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the sentence has half a character at place {error.start}; accepted: whole ones") from None
    if len(tokens) < 2:
        raise InputError(f"letters in the sentence: {len(tokens)}; accepted: two or more")
    notes = [f"Only the first {MOST} of {len(tokens):,} tokens are read."] * (len(tokens) > MOST)
    long = next((letter for letter in text if ord(letter) > 127), None)
    notes += [f"A token is a byte: {long} is read as {len(long.encode())} of them."] if long else []
    return tokens[:MOST], " ".join(notes)


@torch.no_grad()
def _read(model: LanguageModel, tokens: bytes) -> Read:
    """Read a sentence uncut, which gives the thresholds, and then at all CUTS at once, each a row of a batch."""
    ids, activations = torch.tensor([[*tokens]]), [block.mlp.act_fn for block in model.layers]
    with _watched(activations, lambda layer, values: values) as seen:
        model(ids)
    sizes = [values.abs().flatten().sort().values for values in seen]
    bounds = torch.stack([torch.stack([size[int(cut * len(size))] for size in sizes]) for cut in CUTS])
    bounds, row_of = bounds.unique(dim=0, return_inverse=True)  # small cuts may cut nothing
    cut = lambda layer, values: zeroed(values, bounds[:, layer].view(-1, 1, 1))  # noqa: E731
    with _watched(activations, cut) as seen:
        ids = ids.expand(len(bounds), -1)
        scores, kept = model(ids), torch.stack(seen, 2) != 0
        after = generate(model, ids, max_new_tokens=NEW)[:, ids.shape[1] :]
    loss = torch.nn.functional.cross_entropy(scores[:, :-1].mT, ids[:, 1:], reduction="none").mean(1) / math.log(2)
    texts = [bytes(row).decode("utf-8", "replace") for row in after[row_of].tolist()]
    row = model.layers[0].mlp.up_proj.weight[0].nbytes
    return Read(kept[row_of].numpy(), loss[row_of].tolist(), texts, row, 1 + model.config.gated)


@contextmanager
def _watched(modules: list[nn.Module], change: Callable[[int, Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Have what these modules give changed, by their numbers, and appended to a list."""
    seen: list[Tensor] = []

    def hook(number: int, module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        seen.append(change(number, out))
        return seen[-1]

    with ExitStack() as hooks:
        for number, module in enumerate(modules):
            hooks.enter_context(module.register_forward_hook(partial(hook, number)))
        yield seen


# ---- times ----


@torch.inference_mode()
def times(device: str = "cpu", size: tuple[int, int] = SIZE, shares: tuple[float, ...] = SHARES) -> list[Row]:
    """Time a layer of this size for one token here, on the path that leaves silent neurons out, and add what current
    records hold of such a layer on GPUs."""
    d_model, d_ff = size
    dtype = clocks.dtype_for(device)
    layer, inputs = clocks.workload(1, d_model, d_ff, shares[-1] * d_ff, "uniform", dtype, device)
    sparse, calls, fires = SparseFFN(copy.deepcopy(layer).eval(), probed=False), {}, {}
    # x's first number moves the thresholds of all neurons, which are alike: multiplied, it lets each share fire.
    (x, *_), first = inputs, layer.gate_proj.weight[:, 0].float()
    rest = layer.gate_proj(x)[0].float() - first * x[0, 0]
    for share in shares:
        given = x.clone()
        given[0, 0] = -rest.quantile(1 - share) / first.mean()
        fires[share] = int((layer.gate_proj(given) > 0).sum()) / d_ff
        calls[share] = lambda turn, given=given: sparse(given)
    turns = {"dense": lambda turn: layer(x), **{str(share): call for share, call in calls.items()}}
    took = clocks.time_cuda(turns) if torch.device(device).type == "cuda" else clocks.time_cpu(turns, 0.5)
    middle = {name: clocks.quartiles(samples)[0] for name, samples in took.items()}
    where = clocks.device_name(torch.device(device)).removeprefix("NVIDIA ")
    here = [Row(f"here, now: {where}", fires[share], middle[str(share)], middle["dense"]) for share in shares]
    return sorted(here, key=lambda row: row.share) + recorded(size)


def recorded(size: tuple[int, int] = SIZE) -> list[Row]:
    """Current rows of one token on a GPU, by share: a gated layer of this size, on the planned path or packed."""
    rows = []
    for record in records.load_all():
        for row in () if records.stale(record) else record.rows:
            sizes = row.get("tokens"), row.get("d_model"), row.get("d_ff")
            how = row.get("kind"), row.get("path")
            if sizes == (1, *size) and how in (("inference", "planned"), ("map", "packed (TwELL)")):
                where = f"{row['device'].removeprefix('NVIDIA ')}, recorded {record.date[:10]}"
                rows.append(Row(where, row["nnz"] / size[1], row["ms"], row["dense_ms"]))
    return sorted(rows, key=lambda row: (row.where, row.share))


def _between(rows: list[Row], share: float) -> tuple[float, float] | None:
    """Return (ms, dense ms) at a share, on a line between the measured ones; below the least the least one's; None
    above the largest."""
    if share > rows[-1].share:
        return None
    at = [row.share for row in rows]
    took, dense = (np.interp(share, at, [getattr(row, name) for row in rows]) for name in ("ms", "dense_ms"))
    return float(took), float(dense)


# ---- what is shown ----


def view(sentence: Sentence, rows: list[Row], name: str, cut: float = 0.0, token: int = 0) -> dict:
    """Return what a model does with the sentence at one of CUTS, without running it; token: whose neurons to show.

    Returns:
        name, cut, cuts; token, tokens; states: of each neuron at this token, uint8 [layers, d_ff], 0 where it is silent
        by itself, 1 where the cut silences it, 2 where it fires; fires, whole: how many fire at each token, and how
        many would without the cut; share: of neurons that fire, mean over tokens; bytes, dense_bytes: of feed-forward
        weights that a token reads; times: (where, ms, dense ms) of each machine, the first None where nothing was
        measured at so large a share, with the largest that was; losses: by model, at each of CUTS; loss; text."""
    if name not in sentence.models or cut not in CUTS or not 0 <= token < len(sentence.tokens):
        raise InputError(f"model {name!r}, cut {cut!r}, token {token!r}; accepted: those of the sentence and of CUTS")
    done, place = sentence.models[name], CUTS.index(cut)
    now, whole = done.kept[place], done.kept[0]
    fires, neurons, took = now.sum((1, 2)), now[0].size, []
    share = float(fires.mean() / neurons)
    for where in dict.fromkeys(row.where for row in rows):
        own = [row for row in rows if row.where == where]
        took.append((where, *(_between(own, share) or (None, own[-1].share))))
    return {
        "name": name,
        "cut": cut,
        "cuts": CUTS,
        "token": token,
        "tokens": [chr(byte) if 32 < byte < 127 else "·" for byte in sentence.tokens],
        "sentence": sentence.tokens.decode("utf-8", "replace"),
        "states": np.where(now[token], 2, whole[token]).astype(np.uint8),
        "fires": fires.tolist(),
        "whole": np.maximum(whole.sum((1, 2)), fires).tolist(),
        "share": share,
        "bytes": int(done.row * neurons * (1 + done.matrices * share)),
        "dense_bytes": done.row * neurons * (1 + done.matrices),
        "times": took,
        "losses": {other: found.loss for other, found in sentence.models.items()},
        "loss": done.loss[place],
        "text": done.texts[place],
    }


def said(view: dict) -> str:
    """Return what a view shows, in a line."""
    more = round(view["loss"] - view["losses"][view["name"]][0], 2) + 0.0  # never -0.00
    how = f"{percent(view['cut'])} cut" if view["cut"] else "nothing cut"
    cost = f"loss {view['loss']:.2f} bits a token ({more:+.2f} by the cut)"
    return f"{view['name']}, {how}: {view['share']:.1%} of the neurons fire; {cost}"


def percent(share: float) -> str:
    """Return a cut as a slider calls it: 99.5%."""
    return f"{100 * share:.3g}%"


def of(now: float | None, dense: float, show: Callable[[float], str]) -> str:
    """Return what is needed of what dense needs, as text."""
    return f"{show(now)} of {show(dense)}" if now is not None else f"timed up to {dense:.1%}"


def size(count: float) -> str:
    """Return bytes as text: 3.4 MB."""
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"
