"""Run a model over batches and watch its feed-forward layers: what each is given, what its gate answers, and which
tokens these rows are, as far as that is certain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core import InputError, TwellError
from ..layers.find import FeedForward
from ..layers.parts import hidden_of, uncompiled

Gate = Callable[[slice], Tensor]  # gate(rows) gives the pre-activations of these rows of a layer's input, [rows, d_ff]
ALL = slice(None)
# The first position of each group of positions: 0 to 7 each alone, then 8 to 15, 16 to 31, ...; the last has no end.
POSITIONS = (*range(8), *(2**power for power in range(3, 32)))
LATER = 8  # from here on positions stand in groups; the first ones are compared with these


class Rows(NamedTuple):
    """What is certain of the rows that a layer was given, one entry a row; None where it is not known.

    counted: bool, whether the row is a token and no padding. group: int64, in which of POSITIONS it stands in its
    sequence. ids: int64, its token in the model's vocabulary, or the vocabulary's size."""

    counted: Tensor | None = None
    group: Tensor | None = None
    ids: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        return Rows(*(None if values is None else change(values) for values in self))

    def kept(self, values: Tensor) -> Tensor:
        """Return values [..., n] as [tokens, n], with what is no token left out."""
        values = values.reshape(-1, values.shape[-1])
        return values if self.counted is None else values[self.counted.to(values.device)]


def vocabulary_of(model: nn.Module) -> int:
    """Return the size of the model's largest embedding, 0 without any."""
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)


def run(
    model: nn.Module,
    watched: list[tuple[FeedForward, Callable[[Tensor, Gate, Rows], object]]],
    batches: Iterable,
    after: Callable[[Any, list[Rows]], object] = lambda output, rows: None,
) -> None:
    """Run the model over the batches, in evaluation mode, without gradients, and eagerly, since compiled code calls no
    hooks; and leave it as it was.

    watched: layers, each with a function see(x, gate, rows) that is called whenever the layer runs; with thresholds on
    its inputs, gate gives the hidden values. after: called after each batch with the model's output and what is known
    of the tokens that layers saw, those of encoder and decoder apart; the run ends where it returns what is true.
    InputError for weights on meta; for no batches; and for a batch that the model does not take, with its number and
    the model's own error as the cause."""
    if empty := next((name for name, t in model.named_parameters() if t.is_meta), None):
        raise InputError(f"{empty} is on meta, without values; accepted: a model that was loaded")
    if isinstance(batches, (Tensor, Mapping)):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise InputError(f"batches is a {type(batches).__name__}; accepted: an iterable of inputs")
    batch: _Batch | None = None

    def called(layer: FeedForward, see: Callable, module: nn.Module, args: tuple, output: Tensor | None = None) -> None:
        values = args[0] if output is None else output
        values = values.reshape(-1, values.shape[-1])
        gate = lambda of: hidden_of(layer, values[of]) if output is None else values[of]
        see(args[0], gate, batch.rows(layer, args[0]))

    with torch.no_grad(), torch.compiler.set_stance("force_eager"), ExitStack() as undo:
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        for layer, see in watched:
            # A SparseFFN calls its pattern while there is a hook on it.
            on = layer.pattern.register_forward_hook if layer.cut is None else layer.module.register_forward_pre_hook
            undo.callback(on(partial(called, layer, see)).remove)
        for number, given in enumerate(batches):
            batch = _Batch(model, given)
            try:
                output = model(*batch.args, **batch.kwargs)
            except (TwellError, torch.OutOfMemoryError):
                raise
            except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
                raise InputError(f"batch {number} {batch.reason(error)}") from error
            if after(output, [*batch.seen.values()]):
                break
    if batch is None:
        raise InputError("batches is empty; accepted: at least one input of the model")


class _Batch:
    """One input of the model on its device, and what that says of its tokens: which a layer's rows are is certain where
    there are as many rows as token ids or entries of a mask. Without these, rows [batch, sequence, d_model] have
    positions, and others none."""

    def __init__(self, model: nn.Module, given) -> None:
        device, named = next(model.parameters()).device, isinstance(given, Mapping)
        given = [given] if isinstance(given, Tensor) else given
        if not isinstance(given, (Mapping, tuple, list)):
            raise InputError(f"a batch is a {type(given).__name__}; accepted: a tensor, mapping or tuple")
        values = given.values() if named else given
        moved = [value.to(device) if isinstance(value, Tensor) else value for value in values]
        self.args, self.kwargs = ([], dict(zip(given, moved))) if named else (moved, {})
        self.model, self.config = model, getattr(model, "config", None)
        self.seen: dict[str, Rows] = {}  # what is known of the tokens that a layer saw: those of encoder and decoder
        # The first argument is taken for token ids, whatever its name.
        asked = inspect.signature(uncompiled(model).forward).parameters.values()
        names = ["input_ids", *[p.name for p in asked if p.kind is p.POSITIONAL_OR_KEYWORD][1:]]
        self.named = dict(zip(names, self.args)) | self.kwargs
        self.tensors = {name: value for name, value in self.named.items() if isinstance(value, Tensor)}
        self._tokens = {prefix: self._described(prefix) for prefix in ("", "decoder_")}

    def reason(self, error: Exception) -> str:
        """Return what is wrong with the batch, by the model's own error."""
        ids = self.tensors.get("input_ids")
        if isinstance(error, LookupError) and ids is not None and not ids.is_floating_point():
            table = self.model.get_input_embeddings() if hasattr(self.model, "get_input_embeddings") else None
            size = table.num_embeddings if isinstance(table, nn.Embedding) else vocabulary_of(self.model)
            if size and (outside := ids[(ids < 0) | (ids >= size)]).numel():
                return f"has the token {outside[0].item()}; accepted by this model: 0 to {size - 1}"
            longest = getattr(self.config, "max_position_embeddings", None)
            if isinstance(longest, int) and ids.dim() == 2 and ids.shape[1] > longest:
                return f"has {ids.shape[1]} tokens in a sequence; accepted by this model: up to {longest}"
        shown = ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in self.tensors.items())
        takes = "what the model takes, such as token ids [batch, tokens] of a tokenizer with return_tensors='pt'"
        failed = f"makes the model fail with {type(error).__name__}: {error}"
        return f"({shown or 'without a tensor'}) {failed}; accepted: {takes}"

    def rows(self, layer: FeedForward, x: Tensor) -> Rows:
        """Return what is known of the rows of x, the layer's input. InputError where a mask does not fit them."""
        decodes = getattr(self.config, "is_encoder_decoder", False) and "decoder" in layer.name.split(".")
        prefix, lead = "decoder_" if decodes else "", x.shape[:-1]
        shape, known = self._tokens[prefix]
        chosen, many = getattr(layer.pattern, "given", None) or (None, lead.numel())  # given: to a routed expert
        if shape is not None and many == shape.numel() and not lead == shape[::-1] != shape:  # not turned
            self.seen[prefix] = known
            return known if chosen is None else known.map(lambda values: values[chosen.to(values.device)])
        if known.counted is not None:
            mask = f"attention_mask has shape {list(self.named[f'{prefix}attention_mask'].shape)}"
            raise InputError(f"{mask}, but a layer saw {many} positions; accepted: one entry a position")
        if len(lead) != 2 or chosen is not None or (shape is not None and lead[0] != shape[0]):
            return Rows()
        return Rows(group=_group(torch.arange(lead[1], device=x.device).expand(lead)))

    def _described(self, prefix: str) -> tuple[torch.Size | None, Rows]:
        """Return the shape [batch, sequence] of the tokens whose arguments have this prefix, None where nothing says
        which they are, and what is known of each."""
        flat = {name: value for name, value in self.tensors.items() if value.dim() == 2}
        ids, mask, said = (flat.get(prefix + name) for name in ("input_ids", "attention_mask", "position_ids"))
        ids = None if ids is None or ids.is_floating_point() or ids.dtype == torch.bool else ids
        tokens, counted, position = mask if ids is None else ids, None if mask is None else mask != 0, None
        if tokens is None or counted is not None and counted.shape != tokens.shape:
            return None, Rows(counted)
        if said is not None and said.shape in (tokens.shape, (1, tokens.shape[1])):
            position = said.expand(tokens.shape).long()
        elif all(self.named.get(name) is None for name in (f"{prefix}position_ids", "past_key_values", "cache")):
            everyone = torch.ones_like(tokens, dtype=torch.bool) if counted is None else counted
            position = (everyone.cumsum(-1) - 1).clamp(min=0)
        size = vocabulary_of(self.model)
        ids = None if ids is None or not size else torch.where((ids >= 0) & (ids < size), ids, size).long()
        known = Rows(counted, None if position is None else _group(position), ids)
        return tokens.shape, known.map(Tensor.flatten)


def _group(position: Tensor) -> Tensor:
    """Return in which group of POSITIONS tokens at these positions stand, int64 [tokens]."""
    # No table is looked up, whose copying would wait for the device: 2**(power - 1) <= position < 2**power.
    power = torch.frexp(position.clamp(min=LATER).double()).exponent.long()
    return torch.where(position < LATER, position, power + LATER - 4).clamp(0, len(POSITIONS) - 1).flatten()
