"""What `import twell_lab` costs and touches, measured in a fresh interpreter."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, json, sys

def mapped():
    try:
        return {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}
    except OSError:
        return set()

def own():
    return sum(name.partition(".")[0] == "twell_lab" for name in sys.modules)

import torch
before = mapped()
import twell_lab
files = [own()]
importlib.import_module("twell_lab.layers.sparse_ffn")
files.append(own())
for name in "pack ffn SparseFFN sparsify profile plan train bench formats records ops".split():
    getattr(twell_lab, name)
heavy = "cupy plotly ipywidgets anywidget IPython jupyter jupyterlab transformers pandas".split()
print(json.dumps({
    "files": files,
    "heavy": sorted({name.split(".")[0] for name in sys.modules} & set(heavy)),
    "cuda": torch.cuda.is_initialized() or bool(mapped() - before),
}))
"""


def test_import_loads_little_and_touches_no_gpu_and_no_plot():
    """The package itself next to nothing; a sparse layer few files, as that of an operation is imported when it is
    first used."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    package, layer = loaded["files"]
    assert package <= 3 and layer <= 25
    assert loaded["heavy"] == [] and not loaded["cuda"]
