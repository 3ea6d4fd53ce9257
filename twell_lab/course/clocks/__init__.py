"""Notebook 02: a benchmark with its faults, each found by a clock or a count, and a checklist of five lines."""

from . import figures
from .data import (
    Queue,
    asked_and_done,
    cached_side,
    dense_work,
    in_turns,
    operations,
    other_data,
    same_call_twice,
    stop_watch,
    verdict,
    without_multiplying,
)
