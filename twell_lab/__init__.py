"""twell-lab: how activation sparsity in a language model becomes real GPU speed.

Importing the package loads neither CuPy nor plotly, touches no GPU and changes nothing in torch: each name below is
imported when it is first used. `__init__.pyi` tells editors and type checkers of the same names."""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_FACE = {  # name: the module that defines it; "" if the name is a folder of the package
    "pack": "ops.functional",
    "ffn": "ops.functional",
    "train_ffn": "ops.train",
    "SparseFFN": "layers.sparse_ffn",
    "Choice": "layers.choice",
    "LayerPlan": "layers.choice",
    "feed_forwards": "layers.find",
    "register_family": "layers.families",
    "layer_terms": "layers.terms",
    "profile": "analysis.profile",
    "FiringProfile": "analysis.profile",
    "plan": "analysis.planner",
    "Plan": "analysis.planner",
    "sparsify": "models.swap",
    "densify": "models.swap",
    "report": "models.swap",
    "relufy": "models.relufy",
    "thresholds": "models.thresholds",
    "Thresholds": "models.thresholds",
    "load": "models.published",
    "generate": "models.generate",
    "train": "training.loop",
    "TrainConfig": "training.config",
    "SparsityCallback": "training.objective",
    "kernel": "ops.kernels",
    "TwellError": "core",
    "InputError": "core",
    "DeviceError": "core",
    "StackError": "core",
    "bench": "",
    "formats": "",
    "ops": "",
    "plots": "",
    "records": "",
    "simulator": "",
}

__all__ = [*_FACE, "__version__"]


def __getattr__(name: str):
    if name not in _FACE:
        raise AttributeError(f"module 'twell_lab' has no attribute {name!r}")
    module = _FACE[name]
    found = getattr(import_module(f"twell_lab.{module}"), name) if module else import_module(f"twell_lab.{name}")
    globals()[name] = found
    return found


def __dir__():
    return sorted(__all__)
