"""What torch.compile compiles while the layers of a model may change their path (see twell_lab.analysis.switching).

One graph of model and loss is the fastest: it fuses what lies between layers, which saves 3 to 5% of a step on an H100
(the "training" record has whole models, and models compiled layer by layer, both without the loss). But every
combination of paths needs another graph. Compiling one takes 10 seconds and more, and after eight of them torch goes on
without compiling. Where layers are compiled one by one, all layers on the same path share a graph. So they are compiled
one by one at first, and the whole model once no layer has changed its path for a while and enough steps are left for
that to pay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .objective import Objective
from .parallel import blocks

QUIET = 500  # steps without a change of a path, after which no further change is expected
# Passes (forward and backward) that must be left: 4% of so many, at 70 ms each, is how long compiling 8 layers takes.
WORTH = 5000
# The most graphs of the whole model in a run: torch compiles one function eight times in a process, for all its runs.
WHOLES = 4


class Compiled:
    """An objective as it is called, compiled.

    joined: the objective, inside DDP where that is used. whole: whether a graph of the whole model may be made; with
    FSDP2, which gathers the weights of each layer, the graph would break between layers anyway."""

    def __init__(self, objective: Objective, joined: nn.Module, whole: bool) -> None:
        for block in blocks(objective.model):
            block.compile()
        objective.compile_loss()
        self.by_layer, self.whole = joined, torch.compile(joined) if whole else None
        self.call = self.by_layer
        self.changed_at = 0  # the step after which a layer changed its path last
        self.combinations: set[tuple[str, ...]] = set()  # of paths, those with a graph of the whole model

    def __call__(self, *arguments) -> tuple[Tensor, ...]:
        return self.call(*arguments)

    def follow(self, paths: tuple[str, ...], changed: bool, step: int, left: int) -> None:
        """Choose what the next steps call. Every process must call it after the same steps.

        paths: of each layer. changed: whether one has just changed. step: steps made. left: passes still to come."""
        if changed:
            self.changed_at = step
        if step - self.changed_at < QUIET:
            self.call = self.by_layer
        elif self.whole is not None and self.call is self.by_layer and left >= WORTH:
            if paths in self.combinations or len(self.combinations) < WHOLES:
                self.combinations.add(paths)
                self.call = self.whole

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps, so that a resumed run computes its steps as the unbroken one does."""
        return {
            "changed_at": self.changed_at,
            "whole": self.call is not self.by_layer,
            "combinations": [list(paths) for paths in sorted(self.combinations)],
        }

    def load_state_dict(self, state: dict) -> None:
        self.changed_at = state["changed_at"]
        self.combinations = {tuple(paths) for paths in state["combinations"]}
        if state["whole"] and self.whole is not None:
            self.call = self.whole
