"""twell-lab: how activation sparsity in a language model becomes real GPU speed.

Importing the package loads neither CuPy nor plotly and touches no GPU: each name below is looked up on
first use. `twell_lab.profile` and `twell_lab.train` are the functions of the modules of the same name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

# name -> module that defines it ("" after the colon: the module itself)
_FACE = {
    "pack": "ops:pack",
    "gated_ffn": "ops:gated_ffn",
    "plain_ffn": "ops:plain_ffn",
    "SparseFFN": "ffn:SparseFFN",
    "sparsify": "ffn:sparsify",
    "densify": "ffn:densify",
    "feed_forwards": "ffn:feed_forwards",
    "profile": "profile:profile",
    "FiringProfile": "profile:FiringProfile",
    "plan": "planner:plan",
    "Plan": "planner:Plan",
    "LayerPlan": "planner:LayerPlan",
    "Choice": "planner:Choice",
    "train": "train:train",
    "TrainConfig": "train:TrainConfig",
    "train_ffn": "training:train_ffn",
    "layer_terms": "penalty:layer_terms",
    "relufy": "relufication:relufy",
    "bench": "bench:",
    "configurations": "configurations:",
    "datasets": "datasets:",
    "dead": "dead:",
    "errors": "errors:",
    "formats": "formats:",
    "machine": "machine:",
    "model": "model:",
    "ops": "ops:",
    "planner": "planner:",
    "plots": "plots:",
    "records": "records:",
    "reference": "reference:",
    "simulator": "simulator:",
    "switching": "switching:",
    "text": "text:",
    "texts": "texts:",
    "tokenizer": "tokenizer:",
    "TwellError": "errors:TwellError",
    "InputError": "errors:InputError",
    "DeviceError": "errors:DeviceError",
    "CompileError": "errors:CompileError",
    "StackError": "errors:StackError",
    "TextError": "errors:TextError",
    "RecordError": "errors:RecordError",
}

__all__ = [*_FACE, "__version__"]


class _Package(ModuleType):
    """Keeps `twell_lab.profile` and `twell_lab.train` functions: importing a submodule would otherwise
    bind the module of that name over them."""

    def __setattr__(self, name, value):
        if name in ("profile", "train") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str):
    if name not in _FACE:
        raise AttributeError(f"module 'twell_lab' has no attribute {name!r}")
    module, attribute = _FACE[name].split(":")
    found = import_module(f"twell_lab.{module}")
    return getattr(found, attribute) if attribute else found


def __dir__():
    return sorted(__all__)
