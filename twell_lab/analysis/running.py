"""A model run over batches, with an eye on its feed-forward layers: what each was given, what its gate answers, and
which tokens these rows are, as far as that is certain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..layers.find import FeedForward
from ..layers.parts import uncompiled
from ..layers.paths.dense import hidden_of
from ..layers.sparse_ffn import SparseFFN
from ..layers.weights import Weights
from .layer_profile import LATER, POSITIONS

Gate = Callable[[slice], Tensor]  # gate(rows) is the pre-activation of these rows of a layer's input, [rows, d_ff]
ALL = slice(None)


@dataclass(frozen=True)
class Rows:
    """What is known of the rows that a layer was given, one entry a row; None where it is not known.

    counted: bool, whether it is a token and no padding (None: all are). group: int64, in which of POSITIONS it stands
    in its sequence. linked: bool, whether the next row is the token that follows it. ids: int64, its token in the
    model's vocabulary (`vocabulary_of`); what is not in that has the vocabulary's size.
    """

    counted: Tensor | None = None
    group: Tensor | None = None
    linked: Tensor | None = None
    ids: Tensor | None = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        held = (getattr(self, each.name) for each in fields(self))
        return Rows(*(None if values is None else change(values) for values in held))

    def to(self, device: torch.device) -> Rows:
        """The same on another device."""
        return self._each(lambda values: values.to(device))

    @property
    def known(self) -> tuple[bool, ...]:
        """Of each entry, whether it is known."""
        return tuple(getattr(self, each.name) is not None for each in fields(self))

    @staticmethod
    def joined(several: list[Rows]) -> Rows:
        """The rows of several calls, of which the same is known, one after the other."""
        held = zip(*[[getattr(each, field.name) for field in fields(each)] for each in several])
        return Rows(*(None if values[0] is None else torch.cat(values) for values in held))

    def kept(self, values: Tensor) -> Tensor:
        """The layer's input, or its gate's answers, [..., n], as [tokens, n], what is no token left out."""
        values = values.reshape(-1, values.shape[-1])
        return values if self.counted is None else values[self.counted.to(values.device)]

    def part(self, start: int, end: int) -> Rows:
        """Of the rows from start to end."""
        return self._each(lambda values: values[start:end])

    def routed(self, rows: Tensor) -> Rows:
        """Of these rows alone, which are in ascending order: what an expert was given."""
        found = self._each(lambda values: values[rows.to(values.device)])
        if found.linked is not None:
            found.linked.logical_and_(torch.diff(rows, append=rows[-1:]).to(found.linked.device) == 1)
        return found


def vocabulary_of(model: nn.Module) -> int:
    """How many tokens the model can tell apart: the size of its largest embedding; 0 for a model without any."""
    return max((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=0)


def on_gate(layer: FeedForward, see: Callable[[Tensor, Gate], None]):
    """A context within which `see(x, gate)` is called whenever `layer` runs. Of a layer with thresholds on its inputs,
    gate gives the hidden values, zero where they are not kept."""
    if layer.cut is not None:

        def on_cut(module: nn.Module, args: tuple) -> None:
            x = args[0]
            rows = x.reshape(-1, x.shape[-1])
            see(x, lambda of: hidden_by(layer, rows[of]))

        return _removed(layer.module.register_forward_pre_hook(on_cut))
    if isinstance(layer.module, SparseFFN):  # it never calls the projection that decides: compute it again

        def on_sparse(module: SparseFFN, args: tuple) -> None:
            weight, bias, x = layer.pattern.weight, layer.pattern.bias, args[0]
            rows = x.reshape(-1, x.shape[-1])
            see(x, lambda of: module.in_own_order(F.linear(rows[of], weight, bias)))

        return _removed(layer.module.register_forward_pre_hook(on_sparse))

    def on_dense(module: nn.Module, args: tuple, output: Tensor) -> None:
        rows = output.reshape(-1, output.shape[-1])
        see(args[0], lambda of: rows[of])

    return _removed(layer.pattern.register_forward_hook(on_dense))


def hidden_by(layer: FeedForward, rows: Tensor) -> Tensor:
    """What enters the down projection of a layer with thresholds on its inputs: [rows, d_ff]."""
    weights = Weights.of(layer.gate, layer.up, layer.down)
    return hidden_of(rows, weights, layer.acts or torch.relu, layer.both, layer.cut)


@contextmanager
def _removed(hook) -> Iterator[None]:
    """Afterwards the hook is taken off."""
    try:
        yield
    finally:
        hook.remove()


def run(
    model: nn.Module,
    watched: list[tuple[FeedForward, Callable[[Tensor, Gate, Rows], None]]],
    batches: Iterable,
    enough: Callable[[], bool] = lambda: False,
    after: Callable[[Rows], None] = lambda rows: None,
) -> bool:
    """Run the model over the batches until there are enough; `see(x, gate, rows)` is called of each watched layer
    whenever that runs, and `after(rows)` after each batch, of the tokens that layers saw. It runs in evaluation mode
    without gradients, and is left as it was. Returns whether there was a batch. Raises InputError for weights on meta,
    before anything runs, and for batches that it can say something of; others that the model refuses raise the model's
    own error, with a note that says which batch it was."""
    batch: _Batch | None = None
    if empty := next((name for name, t in model.named_parameters() if t.is_meta), None):
        raise InputError(f"{empty} is on meta, without values; accepted: a model that was loaded")
    vocabulary, ran = vocabulary_of(model), False
    shapes: dict[tuple, Rows] = {}
    with evaluating(model), ExitStack() as hooks:
        for layer, see in watched:
            hooks.enter_context(
                on_gate(layer, lambda x, gate, see=see, layer=layer: see(x, gate, batch.rows(layer, x)))
            )
        for number, given in enumerate(_each(batches)):
            batch, ran = _Batch(model, given, vocabulary, shapes), True
            try:
                batch.run()
            except (TypeError, ValueError, LookupError, RuntimeError) as error:
                batch.explain(error, number)
                raise
            for rows in batch.seen:
                after(rows)
            if enough():
                break
    return ran


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and nothing compiled, since hooks are not called in compiled code; afterwards
    each module is back in its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _each(batches) -> Iterable:
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise InputError(f"batches is a {type(batches).__name__}; accepted: an iterable of inputs")
    return batches


class _Batch:
    """One input of the model on its device, and what that says of its tokens.

    Which tokens a layer's rows are is certain where there are as many rows as token ids (or entries of a mask, or
    embeddings), sequence by sequence, in a tensor of any shape; and of the rows that a routed expert was given.
    Where nothing was given by which to tell, rows [batch, sequence, d_model] have positions, and others none.

    shapes: what `_in_sequences` gave for the last shape, which the next batch often has, too.
    """

    def __init__(self, model: nn.Module, given, vocabulary: int, shapes: dict[tuple, Rows]) -> None:
        device = next(model.parameters()).device

        def move(value):
            return value.to(device) if isinstance(value, Tensor) else value

        self.model, self._vocabulary, self._known, self._seen = model, vocabulary, {}, {}
        self._shapes = shapes
        if isinstance(given, Mapping):
            self.given = {name: move(value) for name, value in given.items()}
        elif isinstance(given, (tuple, list)):
            self.given = tuple(move(value) for value in given)
        elif isinstance(given, Tensor):
            self.given = (given.to(device),)
        else:
            raise InputError(f"a batch is a {type(given).__name__}; accepted: a tensor, mapping or tuple")
        self._named = self.given if isinstance(self.given, dict) else dict(zip(_arguments(model), self.given))
        self._decodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def run(self) -> None:
        """Call the model."""
        if isinstance(self.given, dict):
            self.model(**self.given)
        else:
            self.model(*self.given)

    def explain(self, error: Exception, number: int) -> None:
        """What this batch, the one of this number, has to do with an error of the model's: an InputError where it is
        the reason for sure, else a note on the error."""
        if isinstance(error, (InputError, torch.OutOfMemoryError)):
            return
        for name, value in self._named.items():
            if isinstance(value, Tensor) and not value.numel():
                raise InputError(
                    f"batch {number} has no token: {name} has shape {list(value.shape)}; one token or more is accepted"
                ) from error
        ids = self._named.get("input_ids")
        if not isinstance(ids, Tensor):
            if isinstance(ids, (int, float, list)):
                raise InputError(
                    f"batch {number} has a {type(ids).__name__} for a tensor; accepted: token ids [batch, tokens], as "
                    "a tokenizer gives them with return_tensors='pt'"
                ) from error
        elif isinstance(error, LookupError) and (reason := beyond(self.model, ids)):
            raise InputError(f"batch {number} {reason}") from error
        shown = [
            f"{name} {list(each.shape)} {each.dtype}" for name, each in self._named.items() if isinstance(each, Tensor)
        ]
        error.add_note(f"The model failed on batch {number}, counted from 0: {', '.join(shown) or 'without a tensor'}.")

    @property
    def seen(self) -> list[Rows]:
        """Of the tokens that any layer saw: those of an encoder and those of a decoder apart."""
        return list(self._seen.values())

    def rows(self, layer: FeedForward, x: Tensor) -> Rows:
        """What is known of the rows of x, the input of this layer. InputError where a mask does not fit them."""
        prefix = "decoder_" if self._decodes and "decoder" in layer.name.split(".") else ""
        if prefix not in self._known:
            self._known[prefix] = self._tokens(prefix)
        shape, known = self._known[prefix]
        chosen, found = getattr(layer.pattern, "rows", None), x.shape[:-1]
        many = found.numel() if chosen is None else layer.pattern.among
        turned = shape is not None and found == shape[::-1] != shape
        if shape is not None and many == shape.numel() and not turned:
            self._seen[prefix] = known
            return known if chosen is None else known.routed(chosen)
        if known.counted is not None:
            mask = self._named[f"{prefix}attention_mask"]
            raise InputError(
                f"attention_mask has shape {list(mask.shape)}, but a layer saw {many} positions; accepted: one entry a "
                f"position"
            )
        if len(found) != 2 or chosen is not None or (shape is not None and found[0] != shape[0]):
            return Rows()
        return self._in_order(found, x.device)

    def _in_order(self, shape: torch.Size, device: torch.device) -> Rows:
        """`_in_sequences`, made once for batches of one shape."""
        if (key := (shape, device)) not in self._shapes:
            batch, sequence = shape
            self._shapes.clear()
            self._shapes[key] = _in_sequences(batch, sequence, device)
        return self._shapes[key]

    def _tokens(self, prefix: str) -> tuple[torch.Size | None, Rows]:
        """The batch's tokens in their shape [batch, sequence], None where nothing says which they are; and what is
        known of each. prefix: of the arguments that are about them."""

        def flat(name: str) -> Tensor | None:
            value = self._named.get(prefix + name)
            return value if isinstance(value, Tensor) and value.dim() == 2 else None

        ids, mask, embeds = flat("input_ids"), flat("attention_mask"), self._named.get(f"{prefix}inputs_embeds")
        if ids is not None and (ids.is_floating_point() or ids.dtype == torch.bool):
            ids = None
        given = ids if ids is not None else embeds[..., 0] if isinstance(embeds, Tensor) and embeds.dim() == 3 else mask
        if given is None:
            return None, Rows()
        counted = None if mask is None else mask != 0
        if counted is not None and counted.shape != given.shape:
            return None, Rows(counted)
        if counted is None and self._named.get(f"{prefix}position_ids") is self._cache() is None:
            first = self._in_order(given.shape, given.device)
            group, linked = first.group, first.linked
        elif (position := self._positions(prefix, given, counted)) is not None:
            group, linked = _groups(position), _linked(position, counted)
        else:
            group = linked = None
        if ids is not None and self._vocabulary:
            ids = torch.where((ids >= 0) & (ids < self._vocabulary), ids, self._vocabulary).long()
        else:
            ids = None
        each = (None if held is None else held.flatten() for held in (counted, group, linked, ids))
        return given.shape, Rows(*each)

    def _cache(self) -> object:
        """What the model was given of earlier tokens, by either name that transformers has for it."""
        found = self._named.get("past_key_values")
        return self._named.get("cache") if found is None else found

    def _positions(self, prefix: str, given: Tensor, counted: Tensor | None) -> Tensor | None:
        """Which token of its sequence each is; None where earlier ones went before that are not in this batch."""
        said = self._named.get(f"{prefix}position_ids")
        if said is not None:
            fits = isinstance(said, Tensor) and said.dim() == 2 and said.shape[1] == given.shape[1]
            return said.expand(given.shape).long() if fits and said.shape[0] in (1, given.shape[0]) else None
        if self._cache() is not None:
            return None
        assert counted is not None  # or `_tokens` had not asked
        return (counted.long().cumsum(-1) - 1).clamp(min=0)


def beyond(model: nn.Module, ids: Tensor) -> str:
    """Which of a model's tables these token ids [batch, tokens] do not fit into, and what would; "" if none is known
    that they do not."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    known = table.num_embeddings if isinstance(table, nn.Embedding) else None
    if known and (outside := ids[(ids < 0) | (ids >= known)]).numel():
        return f"has the token {outside[0].item()}; accepted by this model: 0 to {known - 1}"
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and ids.dim() == 2 and ids.shape[1] > longest:
        return f"has {ids.shape[1]} tokens in a sequence; accepted by this model: up to {longest}"
    return ""


def _arguments(model: nn.Module) -> list[str]:
    """What the model calls its arguments; the first one is taken for token ids, whatever its name."""
    try:
        said = inspect.signature(uncompiled(model).forward).parameters.values()
    except (TypeError, ValueError):
        said = ()
    return ["input_ids", *[each.name for each in said if each.kind is each.POSITIONAL_OR_KEYWORD][1:]]


def _groups(position: Tensor) -> Tensor:
    """In which group of POSITIONS each position is: no table is looked up, whose copying would wait for the device."""
    power = torch.frexp(position.clamp(min=LATER).double()).exponent.long()  # 2**(power - 1) <= position < 2**power
    return torch.where(position < LATER, position, power + LATER - 4).clamp(0, len(POSITIONS) - 1)


def _linked(position: Tensor, counted: Tensor | None) -> Tensor:
    """Whether each token of [batch, sequence] is followed by the next one of the same text."""
    linked = torch.zeros_like(position, dtype=torch.bool)
    linked[:, :-1] = position.diff(dim=-1) == 1
    if counted is not None:
        linked[:, :-1] &= counted[:, :-1] & counted[:, 1:]
    return linked


def _in_sequences(batch: int, sequence: int, device: torch.device) -> Rows:
    """Of rows that stand in sequences of this length, nothing else being known."""
    position = torch.arange(sequence, device=device).expand(batch, sequence)
    return Rows(group=_groups(position).flatten(), linked=_linked(position, None).flatten())
