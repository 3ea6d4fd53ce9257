"""Call a causal language model so that it can be timed, be it this project's or one of transformers: on whole
sequences, and one token at a time with keys and values that lie where they are. Each with the LM head and without
it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core import InputError
from ..models.generate import Keys, OfLayer, cache_name, read_prompt
from ..models.tiny import LanguageModel

Called = Callable[..., Tensor]


class Kept(Keys):
    """The keys and values of all layers. Each call of a step writes its own into the last place, and attends to all: so
    a step can be repeated, captured in a graph, and taken by several models in turn."""

    def __init__(self, pasts: list[tuple[Tensor, Tensor]]) -> None:
        keys, length = pasts[0][0], pasts[0][0].shape[2]
        super().__init__(pasts, length + 1, torch.tensor([length], device=keys.device))
        self.fill(pasts)
        self.mask = torch.ones(len(keys), 1, 1, self.room, dtype=torch.bool, device=keys.device)

    def part(self, some: slice, dtype: torch.dtype) -> Kept:
        """Return a copy of some of the sequences, in this dtype."""
        return Kept([(keys[some, :, :-1].to(dtype), values[some, :, :-1].to(dtype)) for keys, values in self.layers])


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
                pasts = [OfLayer(kept, number, kept.mask) for number in range(len(kept.layers))]
                return _through(self.model, ids, head, kept.place, pasts)

            return _compiled(own, compiled)
        model = self.model if head else self.model.base_model
        body, cache = _compiled(model, compiled), cache_name(model)

        def step(ids: Tensor, kept: Kept) -> Tensor:
            earlier = {cache: kept}
            result = body(ids, attention_mask=kept.mask, position_ids=kept.place[None], use_cache=True, **earlier)
            return result.logits if head else result.last_hidden_state

        return step

    @torch.no_grad()
    def keep(self, ids: Tensor) -> Kept:
        """Return the keys and values of these tokens [batch, tokens], with a place for one more."""
        return Kept(read_prompt(self.model, ids, None)[1])


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
    places = slice(ids.shape[1]) if place is None else place
    x = model.read(ids, places, pasts or [None] * len(model.layers))
    return model.head(x) if head else x
