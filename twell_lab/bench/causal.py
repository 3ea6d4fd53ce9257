"""Call a causal language model so that it can be timed, be it this project's or one of transformers: on whole
sequences, and one token at a time with keys and values that lie where they are. Each with the LM head and without
it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..models.generate import cache_name, read_prompt
from ..models.tiny import Keys, LanguageModel
from .rows import need

Called = Callable[..., Tensor]


class Kept(Keys):
    """The keys and values of all layers. Each call of a step writes its own into the last place, and attends to all: so
    a step can be repeated, captured in a graph, and taken by several models in turn."""

    mask: Tensor

    def decode(self) -> Kept:
        """Be ready for steps, once a prompt was read."""
        keys = self.layers[0][0]
        self.take(torch.tensor([self.room - 1], device=keys.device), self.room)
        self.mask = torch.ones(len(keys), 1, 1, self.room, dtype=torch.bool, device=keys.device)
        return self

    def part(self, some: slice, dtype: torch.dtype) -> Kept:
        """Return a copy of some of the sequences, in this dtype."""
        layers = [(keys[some].to(dtype, copy=True), values[some].to(dtype, copy=True)) for keys, values in self.layers]
        return Kept(self.room, layers).decode()


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
        take, [batch, tokens, d_model]. Given a Kept too, ids [batch, 1] are the tokens after it."""
        compile_ = functools.partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda call: call
        if self.ours:
            return compile_(lambda ids, kept=None: _through(self.model, ids, head, kept))
        model = self.model if head else self.model.base_model
        body, cache = compile_(model), cache_name(model)

        def read(ids: Tensor, kept: Kept | None = None) -> Tensor:
            earlier: dict = {}
            if kept is not None:
                earlier = {cache: kept, "attention_mask": kept.mask, "position_ids": kept.places[None]}
            result = body(ids, use_cache=kept is not None, **earlier)
            return result.logits if head else result.last_hidden_state

        return read

    @torch.no_grad()
    def keep(self, ids: Tensor) -> Kept:
        """Return the keys and values of these tokens [batch, tokens], with a place for one more."""
        kept = Kept(ids.shape[1] + 1)
        read_prompt(self.model, ids, None, kept)
        return kept.decode()


def _check_causal(model: nn.Module) -> None:
    embedded = getattr(model, "get_output_embeddings", None)
    speaks = callable(embedded) and embedded() is not None and getattr(model, "can_generate", lambda: False)()
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    accepted = "one of transformers with its LM head, or a LanguageModel of this project, as tl.load gives both; "
    accepted += "tl.bench.layer takes a feed-forward layer"
    need(speaks and not encodes, f"{type(model).__name__} is no causal language model", accepted)


def _through(model: LanguageModel, ids: Tensor, head: bool, kept: Kept | None = None) -> Tensor:
    x = model.read(ids, slice(ids.shape[1])) if kept is None else model.read(ids, kept.places, kept, kept.mask)
    return model.head(x) if head else x
