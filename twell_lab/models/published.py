"""Published checkpoints, loaded as what they compute: `load`. What transformers does not know is in
twell_lab.models.foreign. No code of a repository is run, and no pickled weights are read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from ..analysis.saved import read
from ..core import InputError, RecordError, StackError, optional, read_json
from ..ops import clock
from .thresholds import CONFIG, Thresholds
from .tiny import LanguageModel

_FOREIGN = ("llama_sparse_relu", "sparsellama", "minicpm", "bamboo")  # those of twell_lab.models.foreign
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt")  # the files of a repository that are fetched


def load(
    name: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> nn.Module:
    """Return a causal language model, in evaluation mode, with the thresholds on it that it was saved with.

    name: a folder: one that transformers reads, that `LanguageModel.save` wrote, or of a checkpoint of the paper's, of
    ProSparse, MiniCPM-S or Bamboo; or the name of such a repository on the Hugging Face Hub ("SakanaAI/SparseLM0.5B"),
    which is downloaded unless it is in the Hub's cache. dtype: of the weights; by default what the checkpoint says.
    device: where the model goes. revision: of a repository: a branch, tag or commit.

    Raises InputError for a wrong dtype or name, a repository that cannot be reached, weights or thresholds that are
    missing or do not fit, and a model that needs code of its own; DeviceError for a device that is not there;
    StackError where transformers is missing."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype is {dtype!r:.80}; a floating-point dtype of torch is accepted, or None")
    place = clock.present_device(device)
    folder = folder_of(name, revision)
    entries = configuration(folder)
    model = LanguageModel.load(folder) if "format" in entries else _from_transformers(folder, entries, dtype)
    if entries.get(CONFIG) is not None:
        try:
            read(Thresholds, entries[CONFIG], f"{CONFIG} of config.json in {str(folder)!r}").apply(model)
        except RecordError as error:
            raise InputError(str(error)) from error
    return model.to(place, dtype).eval()


def folder_of(name: str | os.PathLike, revision: str | None = None) -> Path:
    """Return a model's folder: the one of this name, or a repository's in the Hub's cache, downloaded if need be.
    Arguments and errors: as in `load`."""
    if not isinstance(name, (str, os.PathLike)):
        raise InputError(f"name is a {type(name).__name__}; a folder or the name of a repository is accepted")
    shown = os.fspath(name)
    if "\0" not in shown and os.path.isdir(shown):
        return Path(shown)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", shown):
        raise InputError(
            f"there is no folder {shown!r:.200}; accepted: one, or a repository's name such as 'owner/name'"
        )
    snapshot_download = optional("huggingface_hub", "loading from the Hub").snapshot_download
    try:
        small = Path(snapshot_download(shown, revision=revision, allow_patterns="*.json"))
        if (small / "config.json").is_file():
            _check_kind(small, configuration(small))
        return Path(snapshot_download(shown, revision=revision, allow_patterns=_WANTED))
    except (InputError, StackError):
        raise
    except Exception as error:  # the Hub's client and the network raise their own kinds
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"there is no folder {shown!r}, and the repository of that name cannot be reached ({type(error).__name__}: "
            f"{reason:.200}); accepted: a folder that is here, or a repository of the Hub, which needs a network"
        ) from error


def configuration(folder: Path) -> dict:
    """Return what config.json says. InputError where there is none."""
    entries = read_json(folder / "config.json", "model") if (folder / "config.json").is_file() else None
    if not isinstance(entries, dict):
        raise InputError(
            f"there is no model in {str(folder)!r}: no config.json with an object; accepted: a folder with one"
        )
    return entries


def tokenizer_of(folder: Path):
    """Return the tokenizer of a model of transformers. InputError where the folder has none that can be read."""
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0].strip().removesuffix(" from one of:")
        raise InputError(
            f"{str(folder)!r} has no tokenizer that transformers can read ({why:.200}); accepted: a folder with the "
            "tokenizer.json that belongs to its model"
        ) from error


def _kind(entries: dict) -> str:
    """Return its model_type; "" where it has none that is a word."""
    kind = entries.get("model_type")
    if kind is None and entries.get("architectures") == ["MiniCPMForCausalLM"]:
        return "minicpm"
    return kind if isinstance(kind, str) else ""


def _check_kind(folder: Path, entries: dict) -> None:
    """Raise InputError for a model of a kind that cannot be loaded: its weights need not be there yet."""
    if "format" in entries or _kind(entries) in _FOREIGN:
        return
    causal = _transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if _kind(entries) not in causal:
        raise InputError(
            f"model_type is {entries.get('model_type')!r:.80} in {str(folder)!r}, and a repository's own code is not "
            f"run; accepted: {', '.join(_FOREIGN)}, and {len(causal)} causal language models of transformers (others: "
            "load them by their own class, profile and sparsify take them)"
        )


def _transformers():
    return optional("transformers", "loading this model")


def _from_transformers(folder: Path, entries: dict, dtype: torch.dtype | None) -> nn.Module:
    """Return a model of transformers, or of twell_lab.models.foreign. InputError for a weight that is missing or has
    another shape, which transformers would draw, and for an unknown one in a model that it does not know."""
    _check_kind(folder, entries)
    kind, source, place = _kind(entries), _transformers().AutoModelForCausalLM, folder
    how = dict(use_safetensors=True, trust_remote_code=False, local_files_only=True, ignore_mismatched_sizes=True)
    try:
        if kind in _FOREIGN:
            from . import foreign

            source, how["config"] = foreign.configured(kind, entries)
            # Whether `down` was saved transposed, as the kernels that trained the paper's read it.
            if entries.get("sparsity_gated_mlp", True) and entries.get("sparsity_use_hybrid_kernel"):
                weights: dict[str, torch.Tensor] = {}
                for path in sorted(folder.glob("*.safetensors")):
                    weights |= safetensors.torch.load_file(path)
                turned = {name: t.t() for name, t in weights.items() if name.endswith(".mlp.down_proj.weight")}
                place, how["state_dict"] = None, weights | turned
        with quiet():
            model, report = source.from_pretrained(place, dtype=dtype or "auto", output_loading_info=True, **how)
    except Exception as error:  # of files, entries, sizes, and of what a quantised model needs: all of their own kinds
        raise InputError(f"{str(folder)!r} cannot be loaded: {error}; accepted: whole safetensors") from error
    for name, here, shape in sorted(report["mismatched_keys"]):
        raise InputError(f"{name} in {str(folder)!r} has shape {list(here)}; {list(shape)} is accepted")
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{str(folder)!r} lacks {missing[0]}, {len(missing)} of the model's weights in all")
    if kind in _FOREIGN and (unknown := sorted(report["unexpected_keys"])):
        raise InputError(f"{str(folder)!r} has {unknown[0]}, which its configuration has no place for")
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers shows no bars, where stderr is no terminal."""
    bars = _transformers().utils.logging
    shown = bars.is_progress_bar_enabled() and not sys.stderr.isatty()
    if shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
