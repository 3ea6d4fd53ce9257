"""Notebook 02: a benchmark with its faults, each found by a clock or a count, and a checklist of five lines."""

from . import figures
from .data import (
    Claims,
    Queue,
    apart,
    asked_and_done,
    cached_side,
    calls_sentence,
    case,
    dense_work,
    in_turns,
    left_behind,
    operations,
    ratio,
    same_call_twice,
    small_calls,
    stop_watch,
    terms,
    three_lines,
    times,
    verdict,
    warm_and_cold,
    without_multiplying,
)
