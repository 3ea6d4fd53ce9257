"""What notebooks print of records alone is what they would print now: a newer record, or other words, and the notebook
has to be stored again. (Their cells cannot be compared by nbval: on a GPU they print the reader's times, too.)"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from twell_lab.course import choosing, clocks, measure, speedups

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
LAYER = {"d_model": 2048, "d_ff": 5632, "nnz": 29}


def of_models() -> str:
    rows = speedups.recorded()
    return "\n".join(speedups.three_lines(speedups.steps(rows, speedups.layers_of(rows)), [])[:2])


def stops() -> str:
    rows = speedups.recorded()
    layers = speedups.layers_of(rows)
    alike = speedups.alike(layers, speedups.trainings(speedups.steps(rows, layers))[0])
    many = speedups.most_measured(alike)
    kinds = {"forward": "inference", "training": "training"}
    return speedups.stops({what: speedups.by_nnz(alike, kind, many) for what, kind in kinds.items()})


LINES: dict[str, list[Callable[[], str]]] = {
    "00-start-here.ipynb": [lambda: measure.plain_calls(measure.recorded_calls(**LAYER))],
    "02-clocks.ipynb": [lambda: clocks.calls_sentence(measure.recorded_calls(**LAYER))],
    "10-choose-a-path.ipynb": [lambda: choosing.predicted_sentence(choosing.recorded_map("H100"))],
    "measured-speedups.ipynb": [of_models, stops],
}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_what_is_stored_of_records_is_what_they_say_now(name, line):
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    printed = "".join("".join(out.get("text", "")) for cell in cells for out in cell.get("outputs", []))
    assert line() in printed, f"store {name} again: it does not print {line()!r}"
