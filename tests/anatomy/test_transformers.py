"""Every class of the installed transformers with the parts of a feed-forward layer: exact once it is swapped, or refused."""

import importlib.util
import inspect
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from twell_lab import anatomy
from twell_lab.errors import InputError
from twell_lab.ffn import SparseFFN, densify, sparsify

pytest.importorskip("transformers")
spec = importlib.util.spec_from_file_location("of_transformers", Path(__file__).with_name("of_transformers.py"))
of_transformers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(of_transformers)


def answers(layer, width):
    """What a layer, or a decoder layer whole, gives for a few inputs, in both modes; its random numbers are the same each time."""
    wanted = list(inspect.signature(layer.forward).parameters.values())[1:]
    others = [None for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    given = []
    for mode in (True, False):
        layer.train(mode)
        for scale in (0.1, 5.0, 300.0):
            torch.manual_seed(7)
            x = scale * torch.randn(2, 6, width)
            with torch.no_grad():
                try:
                    found = layer(x, *others)
                except (ValueError, IndexError, RuntimeError):  # experts take tokens without a batch
                    found = layer(x.flatten(0, 1), *others)
            given += [each for each in (found if isinstance(found, tuple) else [found]) if isinstance(each, torch.Tensor)]
    return given


def outcome(module, name):
    """"exact" or "refused" of a class that can be built; AssertionError of one that computes something else once it is swapped."""
    try:
        layer = of_transformers.build(module, name)
    except Exception as error:  # whatever a constructor raises that was given too little
        return f"not built: {error}"
    width = getattr(layer, anatomy.layout_of(layer)[1]).in_features
    before = {key: id(value) for key, value in layer.state_dict(keep_vars=True).items()}
    try:
        expected = answers(layer, width)
        sparse = sparsify(layer)
    except InputError:
        kept = {key: id(value) for key, value in layer.state_dict(keep_vars=True).items()}
        assert kept == before and not any(isinstance(each, SparseFFN) for each in layer.modules()), f"{name} was changed"
        return "refused"
    except Exception as error:  # it cannot be run on x alone: then it must be refused
        with pytest.raises(InputError):
            sparsify(layer)
        return f"refused: {error}"
    if isinstance(sparse, SparseFFN):
        assert {key: id(value) for key, value in sparse.state_dict(keep_vars=True).items()} == before, name
    found = answers(sparse, width)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item(), equal_nan=True, msg=lambda m: f"{name}: {m}")
    densify(sparse)
    return "exact"


def test_every_class_is_exact_or_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {f"{module}.{name}": outcome(module, name) for module, name in of_transformers.classes()}
    counts = Counter(each.partition(":")[0] for each in found.values())
    unbuilt = {name: each for name, each in found.items() if each.startswith("not built")}
    print(f"{len(found)} classes: {dict(counts)}")
    assert len(found) > 100 and counts["exact"] > 0.7 * len(found), counts
    assert len(unbuilt) < 0.05 * len(found), unbuilt
    by_class = {name.rpartition(".")[2]: each.partition(":")[0] for name, each in found.items()}
    for name in ("BitNetMLP", "DeepseekV4MLP", "Gemma3nTextMLP", "Kosmos2TextFFN", "NemotronHExperts"):
        assert by_class.get(name) != "exact", name
    for name in ("LlamaMLP", "Qwen2MLP", "GemmaMLP", "OPTDecoderLayer", "BartEncoderLayer", "CLIPMLP"):
        assert by_class[name] == "exact", name
