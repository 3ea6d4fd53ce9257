"""What is stored in the notebooks: enough compared cells, pictures instead of widget state, and a first cell
that says what the reader is in for. (The notebooks themselves are run by pytest's --nbval-lax, see the Makefile.)
"""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
# Cells whose stored output nbval compares with what it gets, by notebook. These numbers may only grow.
COMPARED = {
    "00-start-here.ipynb": 8,
    "01-why-gpus-ignore-zeros.ipynb": 12,
    "02-clocks.ipynb": 9,
    "03-a-map-of-sparsity.ipynb": 12,
    "04-train-with-l1.ipynb": 12,
    "05-cut-convert-or-train.ipynb": 8,
    "06-cuda-puzzles.ipynb": 3,
    "07-pack-it.ipynb": 15,
    "08-first-kernels.ipynb": 17,
    "09-hopper-kernels.ipynb": 9,
    "10-choose-a-path.ipynb": 10,
    "11-train-with-the-kernels.ipynb": 18,
    "12-capstone.ipynb": 7,
    "glossary.ipynb": 0,
    "measured-speedups.ipynb": 6,
    "your-own-model.ipynb": 5,
}
WITH_CODE = [name for name, count in COMPARED.items() if count]  # the others are words alone
TAG = "nbval-check-output"
WIDGET = "application/vnd.jupyter.widget-view+json"
MOST_BYTES = 1_500_000  # a notebook
MOST_OUTPUT = 400_000  # one output
SAYS = ("**Time:**", "**Needs:**", "**Stored figures:**")


def read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def source(cell: dict) -> str:
    return "".join(cell["source"])


def code(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tagged(cell: dict) -> bool:
    return TAG in cell["metadata"].get("tags", [])


def compared(notebook: dict) -> int:
    """Cells that nbval really compares: tagged, with something stored, and run (it skips those never counted)."""
    return sum(
        tagged(cell) and bool(cell["outputs"]) and cell["execution_count"] is not None for cell in code(notebook)
    )


def faults(notebook: dict) -> list[str]:
    """What a stored notebook must not be like."""
    found = []
    if "widgets" in notebook["metadata"]:
        found.append("widget state is stored")
    kernel = notebook["metadata"].get("kernelspec", {})
    if kernel.get("name") != "python3":
        found.append(f"the kernel is {kernel.get('name')!r}")
    for cell in code(notebook):
        if "NBVAL" in source(cell):
            found.append(f"a mark for nbval is in the reader's way: {source(cell)[:60]!r}")
        if cell["execution_count"] is None:
            found.append(f"never run: {source(cell)[:60]!r}")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if output["output_type"] == "error":
                found.append(f"an error is stored: {output['ename']}")
            if WIDGET in data:
                found.append("a widget is stored, which shows nothing without its state")
            if "application/vnd.plotly.v1+json" in data and "image/png" not in data:
                found.append("a figure without its picture")
            if "image/png" in data and not output["metadata"].get("image/png", {}).get("alt"):
                found.append("a picture without words for those who cannot see it")
            if tagged(cell) and data:
                found.append(f"a figure in a compared cell: {source(cell)[:60]!r}")
            if len(json.dumps(output)) > MOST_OUTPUT:
                found.append(f"an output of {len(json.dumps(output)):,} bytes")
    return found


def test_every_notebook_is_listed():
    assert sorted(path.name for path in FOLDER.glob("*.ipynb")) == sorted(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_the_compared_cells_never_become_fewer(name):
    assert compared(read(name)) >= COMPARED[name]


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_stored(name):
    assert not faults(read(name))
    assert (FOLDER / name).stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_first_cell_states_time_needs_and_where_its_figures_are_from(name):
    notebook = read(name)
    first = notebook["cells"][0]
    assert first["cell_type"] == "markdown"
    assert [word for word in SAYS if word not in source(first)] == []
    # What the set-up cell printed when the figures were made is what the first cell claims.
    printed = "".join("".join(output.get("text", "")) for output in code(notebook)[0]["outputs"])
    machine = re.search(r"This machine: (.+)", printed)
    assert machine and machine[1] in source(first)


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_first_code_cell_offers_one_command_and_upgrades_nothing(name):
    notebook = read(name)
    assert "%pip install" in source(code(notebook)[0])
    everything = "\n".join(map(source, code(notebook)))
    assert not re.search(r"--upgrade|pip install -U|pip uninstall", everything)
    assert len(re.findall("pip install", everything)) == 1


@pytest.mark.parametrize("name", COMPARED)
def test_links_between_notebooks_lead_somewhere(name):
    text = "\n".join(source(cell) for cell in read(name)["cells"] if cell["cell_type"] == "markdown")
    assert not [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (FOLDER / link).exists()]


@pytest.mark.parametrize("name", COMPARED)
def test_a_reader_who_predicts_is_answered(name):
    guessing = [cell for cell in code(read(name)) if re.search(r"^(guess|guesses|my_mb)\b.* = ", source(cell), re.M)]
    assert all(cell["outputs"] for cell in guessing), [source(cell) for cell in guessing if not cell["outputs"]]


@pytest.mark.parametrize("name", WITH_CODE)
def test_a_reader_predicts_something(name):
    assert "Predict, then run" in "\n".join(map(source, read(name)["cells"]))


@pytest.mark.parametrize("name", WITH_CODE)
def test_a_result_stands_within_three_cells(name):
    """A figure, or a number. The first cell, which is the same in all, does not count."""
    outputs = [output for cell in code(read(name))[1:4] for output in cell["outputs"]]
    texts = ["".join(output.get("text", "")) for output in outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs) or re.search(r"\d", "".join(texts))


def notebook_with(cell: dict, **metadata) -> dict:
    full = {"cell_type": "code", "source": ["1"], "execution_count": 1, "metadata": {"tags": [TAG]}, "outputs": []}
    return {"cells": [full | cell], "metadata": {"kernelspec": {"name": "python3"}} | metadata}


WORDS = {"image/png": {"alt": "A figure"}}
PRINTED = {"output_type": "stream", "name": "stdout", "text": ["1"]}


def test_counting_leaves_out_what_nbval_would_skip():
    assert compared(notebook_with({"outputs": [PRINTED]})) == 1
    assert compared(notebook_with({"outputs": [PRINTED], "execution_count": None})) == 0
    assert compared(notebook_with({"outputs": []})) == 0
    assert compared(notebook_with({"outputs": [PRINTED], "metadata": {}})) == 0


@pytest.mark.parametrize(
    "breach",
    [
        notebook_with({}, widgets={}),
        notebook_with({}, kernelspec={"name": "mine"}),
        notebook_with({"source": ["# NBVAL_SKIP\n", "1"]}),
        notebook_with({"execution_count": None}),
        notebook_with({"outputs": [{"output_type": "error", "ename": "ValueError"}]}),
        notebook_with({"metadata": {}, "outputs": [{"output_type": "display_data", "data": {WIDGET: {}}}]}),
        notebook_with(
            {
                "metadata": {},
                "outputs": [{"output_type": "display_data", "data": {"application/vnd.plotly.v1+json": {}}}],
            }
        ),
        notebook_with(
            {
                "metadata": {},
                "outputs": [{"output_type": "display_data", "data": {"image/png": ""}, "metadata": {"image/png": {}}}],
            }
        ),
        notebook_with({"outputs": [{"output_type": "display_data", "data": {"image/png": ""}, "metadata": WORDS}]}),
        notebook_with({"outputs": [PRINTED | {"text": ["x" * MOST_OUTPUT]}]}),
    ],
)
def test_faults_are_found(breach):
    assert len(faults(breach)) == 1


def test_a_sound_notebook_has_no_faults():
    assert not faults(notebook_with({"outputs": [PRINTED]}))
