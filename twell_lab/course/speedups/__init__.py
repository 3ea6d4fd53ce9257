"""The workshop "measured speedups": how a layer's speedup becomes a model's, recorded and measured here."""

from . import figures
from .data import (
    Step,
    about,
    alike,
    amdahl,
    by_nnz,
    by_tokens,
    compared,
    costs,
    crossing,
    layer_needed,
    layers_of,
    measured,
    most_measured,
    pieces,
    recorded,
    share_from,
    steps,
    stops,
    three_lines,
    trainings,
    yours,
)
