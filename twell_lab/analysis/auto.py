"""A layer that plans itself: it counts who fires in the first batches it sees, and then decides. `sparsify` without a
plan has every layer do so."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..layers.choice import LayerPlan
from ..layers.paths import PATHS
from ..layers.sparse_ffn import SparseFFN
from . import costs, planner
from .profile import Counter
from .room import Room
from .running import hidden_by
from .trials import Subject, Trials

# A layer has seen enough after TOKENS tokens, or after FORWARDS forwards of LEAST tokens together: what a few tokens
# fire says little of others, as when a text is written token by token.
TOKENS, FORWARDS, LEAST = 4096, 8, 128


class Shared:
    """What the watching layers of one model share: the measured rates of each device and dtype, what was timed, and the
    room for copies of weights (None: any). others: the bytes of the model's weights but those of a layer."""

    def __init__(self, room: Room | None = None, others: int = 0) -> None:
        self.room = room
        self.rates: dict = {}
        self.trials = Trials(beside=others)


class Watch:
    """Watches one SparseFFN. Counting stays on the layer's device; only the decision waits for it, once.

    The batch that is at hand when enough was counted is not counted itself: the candidates are timed on it.
    """

    def __init__(self, shared: Shared, name: str) -> None:
        self.shared, self.name = shared, name
        self.tokens = self.forwards = 0
        self.counter: Any = None

    @torch.no_grad()
    def see(self, layer: SparseFFN, x: Tensor) -> LayerPlan | None:
        """Count one input of the layer. Returns the LayerPlan once there is one, and None before."""
        rows = x.reshape(-1, x.shape[-1])
        weight = layer.up.weight
        if (
            not rows.shape[0]
            or rows.dtype != weight.dtype
            or rows.device != weight.device
            or rows.shape[1] != weight.shape[1]
        ):
            return None  # nothing to count, or nothing that this layer takes: its forward says so
        if self.tokens >= TOKENS or (self.forwards >= FORWARDS and self.tokens >= LEAST):
            return self._decide(layer, rows)
        if self.counter is None:
            found = replace(layer.feed_forward(""), name=self.name)
            self.counter = Counter(found, layer.tile, layer.words)
        pattern = self.counter.layer.pattern
        gate = partial(linear, weight=pattern.weight, bias=pattern.bias)
        if self.counter.layer.cut is not None:
            gate = partial(hidden_by, self.counter.layer)
        self.counter.add(rows, lambda of: gate(rows[of]))
        self.tokens += rows.shape[0]
        self.forwards += 1
        return None

    def _decide(self, layer: SparseFFN, rows: Tensor) -> LayerPlan:
        weight = layer.up.weight
        kind = (str(weight.device), weight.dtype)
        if kind not in self.shared.rates:
            self.shared.rates[kind] = costs.measure_rates(weight.device, weight.dtype)
        profile = self.counter.result()
        # Repeating a few rows many times would time a batch in which every token fires the same neurons.
        timed = [most for most in planner.TOKENS if most <= 4 * rows.shape[0]]
        subject = Subject(profile, self.counter.layer, rows.detach)
        rates = self.shared.rates[kind]
        paths = {name: PATHS[name] for name in planner.paths_for(self.counter.layer, [*PATHS])}
        plan = planner.plan_layer(profile, rates, planner.TOKENS, subject, self.shared.trials, timed, paths)
        return plan if self.shared.room is None else self.shared.room.fit(self.counter.layer, plan, rates)
