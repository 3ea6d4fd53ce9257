"""The course with the versions that Colab has, from the built wheel, each notebook in an empty folder: `make test-colab`.

Here as there: Python 3.13 or 3.12 where one is found (COLAB_PYTHON names another), the versions in
constraints/colab.txt, CuPy without a toolkit of its own, widgets that are drawn anew at each move. Different: torch
2.11.0 is what the index has (on Linux built for CUDA 13, Colab's for 12.8) or, if pip is set up so, a CPU build; the
other packages are the newest; there is no GPU, and no google.colab: a variable that Colab sets stands for it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

nbclient = pytest.importorskip("nbclient")
ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb") if path.stem != "glossary")  # words alone
PINS = ROOT / "constraints" / "colab.txt"
# Colab has these too, in versions that are not pinned here: what the kernel needs, and the rest of the course.
BESIDE = ["ipykernel<7", "nbformat", "tqdm", "safetensors", "jinja2", "transformers"]
SECONDS_TO_INSTALL = 60


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with Colab's versions, kept in build/ between runs, without this package."""
    named = (os.environ.get("COLAB_PYTHON"), *map(shutil.which, ("python3.13", "python3.12")), sys.executable)
    versions = ((each, starts(each)) for each in named if each)
    interpreter, version = next((each, version) for each, version in versions if version)
    place = ROOT / "build" / "colab"
    made, wanted = place / "made", "\n".join([version, PINS.read_text(), *BESIDE])
    inside = place / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not made.is_file() or made.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        run(interpreter, "-m", "venv", str(place / "env"))
        pinned = [line.partition("==")[0] for line in PINS.read_text().splitlines() if "==" in line]
        run(inside, "-m", "pip", "install", "-q", "-c", str(PINS), *pinned, *BESIDE)
        made.write_text(wanted)
    run(inside, "-m", "pip", "uninstall", "-q", "-y", "twell-lab")
    return inside


@pytest.fixture(scope="module")
def wheel(python, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    return next(folder.glob("twell_lab-*.whl"))


@pytest.fixture
def kernel(python, tmp_path, monkeypatch):
    """kernel(notebook) runs it in an empty folder, with the wheel of what is given beside it."""
    spec = tmp_path / "share" / "kernels" / "colab" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    environment = {"COLAB_RELEASE_TAG": "as on Colab", "PYTHONPATH": ""}
    spec.write_text(json.dumps({"argv": command, "env": environment, "display_name": "Colab", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))

    def execute(notebook, *beside: Path) -> None:
        folder = tmp_path / "empty"
        folder.mkdir()
        for path in beside:
            shutil.copy(path, folder)
        place = {"metadata": {"path": str(folder)}}
        say = lambda cell, cell_index: print(f"cell {cell_index}: {cell.source.partition(chr(10))[0]}", flush=True)
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="colab", resources=place, on_cell_execute=say
        )
        client.widget_registry = {"@jupyter-widgets/output": {}}  # what it does for an output widget can take minutes
        client.execute()

    return execute


def run(*command) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def starts(interpreter: str) -> str:
    """Its version; "" where it doesn't start, as a version manager's name for one that isn't chosen."""
    return subprocess.run([interpreter, "-V"], capture_output=True, text=True).stdout


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_first_cell_installs_the_wheel_in_time_and_replaces_nothing(python, wheel, kernel):
    before = set(run(python, "-m", "pip", "freeze").splitlines())
    notebook = nbformat.read(ROOT / "notebooks" / NAMES[0], as_version=4)
    first = code(notebook)[0]
    notebook.cells = [first, nbformat.v4.new_code_cell(first.source), nbformat.v4.new_code_cell("import plotly, torch")]
    start = time.perf_counter()
    kernel(notebook, wheel)
    assert time.perf_counter() - start < SECONDS_TO_INSTALL
    assert "This machine: " in printed(first) and "pip" not in printed(notebook.cells[1])
    after = set(run(python, "-m", "pip", "freeze").splitlines())
    assert not before - after and [line.partition(" @")[0] for line in after - before] == ["twell-lab"]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs(name, wheel, kernel):
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    kernel(notebook, wheel)
    said = "".join(map(printed, code(notebook)))
    assert "Traceback" not in said and "plotly 5.24.1" in said
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "stream" or output.name != "stderr", f"{cell.source}\n\n{output.text}"
