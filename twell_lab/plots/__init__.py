"""Plotly figures, made of rows and numbers alone. May import formats and core.

The names below are those of `figures`, which needs plotly and is imported when the first of them is used. The module
`data` needs no package."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .figures import (
        BLUE,
        COLOURS,
        FAINT,
        GREEN,
        GREY,
        INK,
        ORANGE,
        PURPLE,
        RED,
        SKY,
        firing_by_layer,
        firing_by_position,
        neuron_frequency,
        packed_tile,
        profiles_compared,
        speedups,
        styled,
        training_curves,
    )

__all__ = [
    "BLUE",
    "COLOURS",
    "FAINT",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PURPLE",
    "RED",
    "SKY",
    "firing_by_layer",
    "firing_by_position",
    "neuron_frequency",
    "packed_tile",
    "profiles_compared",
    "speedups",
    "styled",
    "training_curves",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".figures", __name__), name)
