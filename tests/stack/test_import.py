"""What `import twell_lab` costs and touches, measured in a fresh interpreter."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("cupy", "plotly", "ipywidgets", "anywidget", "IPython", "jupyter", "jupyterlab", "transformers", "pandas")

PROGRAM = """
import importlib, json, sys

def mapped():
    try:
        return {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}
    except OSError:
        return set()

import torch
before = mapped()
import twell_lab
own = sum(name.startswith("twell_lab.") for name in sys.modules)
for name in NAMES:
    importlib.import_module(name) if "." in name else getattr(twell_lab, name)
print(json.dumps({
    "own": own,
    "files": sum(name.partition(".")[0] == "twell_lab" for name in sys.modules),
    "heavy": sorted({name.split(".")[0] for name in sys.modules} & set(HEAVY)),
    "cuda": torch.cuda.is_initialized() or bool(mapped() - before),
}))
"""


def fresh(names: tuple[str, ...]) -> dict:
    program = f"NAMES = {names!r}; HEAVY = {HEAVY!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_next_to_nothing_and_touches_no_gpu():
    found = fresh(())
    assert found["own"] <= 2
    assert found["heavy"] == [] and not found["cuda"]


def test_a_sparse_layer_loads_few_of_the_packages_files():
    """The file of an operation is imported when it is first used."""
    assert fresh(("twell_lab.layers.sparse_ffn",))["files"] <= 25


def test_the_library_itself_loads_neither_cupy_nor_a_plot():
    names = ("pack", "ffn", "SparseFFN", "sparsify", "profile", "plan", "train", "bench", "formats", "records", "ops")
    found = fresh(names)
    assert found["heavy"] == [] and not found["cuda"]
