"""How a causal language model is called to be timed, be it this project's or one of transformers: on whole sequences,
and one token at a time with keys and values that lie where they are. Each with the LM head and without it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core import InputError
from ..models.tiny import LanguageModel, Past

Called = Callable[..., Tensor]


class Kept:
    """The keys and values of all layers. Each call of a step writes its own into the last place, and attends to all: so
    a step can be repeated, captured in a graph, and taken by several models in turn. It is what models take as their
    cache."""

    is_compileable = False  # which transformers asks of a cache; a step is compiled by hand

    def __init__(self, filled: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.kept = [tuple(pad(part, (0, 0, 0, 1)) for part in layer) for layer in filled]
        keys = self.kept[0][0]
        self.length = keys.shape[2]
        self.place = torch.tensor([self.length - 1], device=keys.device)
        self.mask = torch.ones(len(keys), 1, 1, self.length, dtype=torch.bool, device=keys.device)

    def part(self, some: slice, dtype: torch.dtype) -> Kept:
        """Return a copy of some of the sequences, in this dtype."""
        return Kept((keys[some, :, :-1].to(dtype), values[some, :, :-1].to(dtype)) for keys, values in self.kept)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Return what the attention of a layer calls: take its new keys and values, and give all."""
        for kept, new in zip(self.kept[layer], (keys, values)):
            kept.index_copy_(2, self.place, new)
        return self.kept[layer]

    def get_seq_length(self, *_) -> int:
        return self.length - 1


class _OfLayer:
    """One layer's part of a Kept, as a Past."""

    def __init__(self, kept: Kept, layer: int) -> None:
        self.kept, self.layer = kept, layer

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.kept.update(key, value, self.layer)


class Causal:
    """A causal language model. Raises InputError for a module that is none."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.ours = model, isinstance(model, LanguageModel)
        if not self.ours:
            _check_causal(model)

    @property
    def vocabulary(self) -> int:
        """Return how many token numbers there are."""
        return self.model.config.vocabulary if self.ours else self.model.get_input_embeddings().weight.shape[0]

    @property
    def context(self) -> int:
        """Return the most tokens of an input, as far as the configuration says."""
        config = self.model.config
        return config.context if self.ours else getattr(config, "max_position_embeddings", None) or 2048

    def reader(self, head: bool = True, *, compiled: bool = False) -> Called:
        """Return a call: ids [batch, tokens] -> logits [batch, tokens, vocabulary], or without the head what that would
        take, [batch, tokens, d_model]."""
        if self.ours:
            return _compiled(lambda ids: _through(self.model, ids, head), compiled)
        model = _compiled(self.model if head else self.model.base_model, compiled)

        def read(ids: Tensor) -> Tensor:
            result = model(ids, use_cache=False)
            return result.logits if head else result.last_hidden_state

        return read

    def stepper(self, head: bool = True, *, compiled: bool = False) -> Called:
        """Return a call of one step of decoding: ids [batch, 1], Kept -> logits [batch, 1, vocabulary], or what the
        head would take, of that token."""
        if self.ours:

            def own(ids: Tensor, kept: Kept) -> Tensor:
                pasts = [_OfLayer(kept, number) for number in range(len(kept.kept))]
                return _through(self.model, ids, head, kept.place, pasts)

            return _compiled(own, compiled)
        model = self.model if head else self.model.base_model
        body, cache = _compiled(model, compiled), _cache(model)

        def step(ids: Tensor, kept: Kept) -> Tensor:
            earlier = {cache: kept}
            result = body(ids, attention_mask=kept.mask, position_ids=kept.place[None], use_cache=True, **earlier)
            return result.logits if head else result.last_hidden_state

        return step

    @torch.no_grad()
    def keep(self, ids: Tensor) -> Kept:
        """Return the keys and values of these tokens [batch, tokens], with a place for one more."""
        if self.ours:
            pasts = [Past(ids.shape[1]) for _ in self.model.layers]
            _through(self.model, ids, False, pasts=pasts)
        else:
            body = self.model.base_model
            pasts = getattr(body(ids, use_cache=True), _cache(body)).layers
        return Kept(_emptied(pasts))


def _cache(model: nn.Module) -> str:
    """Return what a model calls the keys and values of earlier tokens, as argument and in its output: transformers 5.24
    gave that another name, and warns of the old one."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _emptied(pasts: list) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the keys and values of each layer, taken off the list: all together may be half of a GPU's memory, and what
    was copied is not needed any more."""
    while pasts:
        past = pasts.pop(0)
        yield past.keys, past.values


def _check_causal(model: nn.Module) -> None:
    embedded = getattr(model, "get_output_embeddings", None)
    speaks = callable(embedded) and embedded() is not None and getattr(model, "can_generate", lambda: False)()
    if not speaks or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} is no causal language model; accepted: one of transformers with its LM head, or a "
            "LanguageModel of this project, as tl.load gives both; tl.bench.layer takes a feed-forward layer"
        )


def _compiled(call, compiled: bool):
    return torch.compile(call, fullgraph=True, dynamic=False) if compiled else call


def _through(model: LanguageModel, ids: Tensor, head: bool, place: Tensor | None = None, pasts: list | None = None):
    """Return what the model gives for ids [batch, tokens], or what its head would take. place: of all the tokens, int64
    [1], where they are one each; by default they are the first ones."""
    tables = model.cosine, model.sine
    cosine, sine = (t[: ids.shape[1]] if place is None else t.index_select(0, place) for t in tables)
    x = model.embedding(ids)
    for layer, past in zip(model.layers, pasts or [None] * len(model.layers), strict=True):
        x = layer(x, cosine, sine, past)
    x = model.norm(x)
    return model.head(x) if head else x
