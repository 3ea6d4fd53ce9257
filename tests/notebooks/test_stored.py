"""What is stored in the notebooks: cells that nbval compares, pictures instead of widget state, nothing huge.

The notebooks themselves are run by pytest's --nbval-lax, see the Makefile.
"""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
FEWEST = 3  # compared cells of a notebook that has code
TAG = "nbval-check-output"
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"
WIDGET = "application/vnd.jupyter.widget-view+json"
MOST_BYTES, MOST_OUTPUT = 1_500_000, 400_000  # of a notebook, of one output


def code(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def compared(notebook: dict) -> int:
    """Cells that nbval really compares: tagged, with something stored, and run (it skips those never counted)."""
    tagged = [cell for cell in code(notebook) if TAG in cell["metadata"].get("tags", [])]
    return sum(bool(cell["outputs"]) and cell["execution_count"] is not None for cell in tagged)


def faults(notebook: dict) -> list[str]:
    """What a stored notebook must not be like."""
    found = ["widget state"] * ("widgets" in notebook["metadata"])
    found += ["another kernel"] * (notebook["metadata"].get("kernelspec", {}).get("name") != "python3")
    for cell in code(notebook):
        found += ["a cell that never ran"] * (cell["execution_count"] is None)
        for output in cell["outputs"]:
            data = output.get("data", {})
            found += ["an error"] * (output["output_type"] == "error")
            found += ["a widget, which shows nothing without its state"] * (WIDGET in data)
            found += ["a figure without its picture"] * (FIGURE in data and PICTURE not in data)
            alt = output.get("metadata", {}).get(PICTURE, {}).get("alt")
            found += ["a picture without words for those who cannot see it"] * (PICTURE in data and not alt)
            found += ["a large output"] * (len(json.dumps(output)) > MOST_OUTPUT)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored(name):
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert not faults(notebook) and (FOLDER / name).stat().st_size <= MOST_BYTES
    assert not code(notebook) or compared(notebook) >= FEWEST
