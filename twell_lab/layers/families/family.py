"""What a family of models says of its feed-forward layers: where their parts are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...core import InputError
from ..parts import part_at, projection


@dataclass(frozen=True)
class Family:
    """Where the parts of a feed-forward layer are, in the families of models that call them so.

    A hint only: before a module with these parts is swapped, it is run beside the formula down(act(gate(x)) * up(x)),
    or down(act(up(x))) without a gate, and refused where it computes something else (twell_lab.layers.probe).

    models: who has such layers, as messages list them. up, down, activation, gate: the places of the parts in the
    module, such as "fc1" or "output.dense"; gate is None in plain layers, and the same as up where one projection holds
    both, the gate's rows first. Projections are plain torch.nn.Linear, transformers' Conv1D or FalconLinear. inside:
    the module stays and its activation is swapped, since more is done in it; for plain layers alone. residual: the
    module's forward needs a second argument, rows like the first, which it adds. dropout: the place of a
    torch.nn.Dropout before the down projection, which is done in training; one inside a module that stays has to be of
    p=0.

    Raises InputError for places that are no names, for flags that are no bool, and for a gated layer inside its module.
    """

    models: str
    up: str
    down: str
    activation: str
    gate: str | None = None
    inside: bool = False
    residual: bool = False
    dropout: str | None = None

    def __post_init__(self) -> None:
        optional = [place for place in (self.gate, self.dropout) if place is not None]
        for place in (self.models, self.up, self.down, self.activation, *optional):
            if not isinstance(place, str) or not place:
                raise InputError(f"a family's name or place is {place!r}; a string such as 'fc1' is accepted")
        for name in ("inside", "residual"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(
                    f"{name} of the family of {self.models} is {getattr(self, name)!r:.80}; True or False is accepted"
                )
        if self.inside and (self.gate or self.dropout):
            what = "gated" if self.gate else "with a dropout"
            raise InputError(f"the family of {self.models} is {what} and inside; accepted: inside for plain layers")
        if not self.inside and any("." in seat for seat in self.seats):
            raise InputError(f"the family of {self.models} has a place within a part; accepted: with inside=True")
        if len({self.up, self.down, self.activation}) < 3 or self.gate in (self.down, self.activation):
            raise InputError(f"two parts of the family of {self.models} are in one place; accepted: gate and up alone")

    @property
    def fused(self) -> bool:
        """Whether one projection holds gate and up."""
        return self.gate == self.up

    @property
    def projections(self) -> tuple[str, ...]:
        """The places of the projections, each once."""
        return tuple(dict.fromkeys(seat for seat in (self.gate, self.up, self.down) if seat))

    @property
    def seats(self) -> tuple[str, ...]:
        """The places of all parts, each once."""
        return (*self.projections, self.activation)

    def owners(self, module: nn.Module) -> dict[str, nn.Module]:
        """The modules that hold the projections, by their places."""
        return {seat: part_at(module, seat) for seat in self.projections}

    def acts(self, module: nn.Module) -> object:
        """The activation of a module that has one."""
        return part_at(module, self.activation)

    def drop(self, module: nn.Module) -> nn.Dropout | None:
        """The dropout before the down projection of a module that has one."""
        found = part_at(module, self.dropout) if self.dropout else None
        return found if isinstance(found, nn.Dropout) else None

    def parts(self, module: nn.Module) -> list:
        """Gate (or None), up, down and the activation of a module that has them."""
        held = self.owners(module)
        gate = projection(held[self.gate], 0 if self.fused else None) if self.gate else None
        up = projection(held[self.up], 1 if self.fused else None)
        return [gate, up, projection(held[self.down]), self.acts(module)]

    def carried(self, module: nn.Module) -> set[int]:
        """The ids of the modules that go into a sparse layer as they are: the projections, and all within them."""
        return {id(each) for part in self.owners(module).values() for each in part.modules()}
