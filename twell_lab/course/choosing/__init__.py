"""The notebook on choosing a path: methods that skip silent neurons or tokens, and which is fastest where."""

from . import figures
from .data import (
    dearer,
    expert_rows,
    expert_sentence,
    grains,
    hot_rows,
    hot_sentence,
    lossy_rows,
    map_rows,
    occupied_rows,
    occupied_sentence,
    padding_rows,
    padding_sentence,
    predicted_sentence,
    predictor_sentence,
    products_here,
    products_sentence,
    recorded,
    recorded_map,
    recorded_maps,
    study,
    three_lines,
    token_rows,
    works,
)
