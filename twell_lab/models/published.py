"""Published checkpoints, loaded as what they are: `load`.

The models of the method's paper (arXiv 2603.23198, SakanaAI/SparseLM0.5B to 2B) have a model_type that transformers
does not know, "llama_sparse_relu", and a config.json whose hidden_act says silu while their layers compute a ReLU.
Their weights are named as a Llama's. What decides is in the other entries that begin with "sparsity_": whether the
layers have a gate, how wide they are, and whether `down` was saved transposed, as the kernels that trained it read it.
Other ReLU models that transformers does not know are in twell_lab.models.foreign.

No code of a repository is run, and no pickled weights are read."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..core import InputError, RecordError, StackError, read_json
from ..ops import clock
from .thresholds import CONFIG, Thresholds
from .tiny import LanguageModel

# The model_type of a checkpoint whose layers compute a ReLU, whatever its hidden_act says: that of the same model in
# transformers, with gated layers and with plain ones (None: there is no such model).
_SPARSE_RELU = {"llama_sparse_relu": ("llama", "arcee"), "qwen2_sparse_relu": ("qwen2", None)}
_FOREIGN = ("sparsellama", "minicpm", "bamboo")  # those of twell_lab.models.foreign
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt")  # the files of a repository that are fetched
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"


def load(
    name: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> nn.Module:
    """A causal language model, in evaluation mode, with the thresholds on it that it was saved with.

    Args:
        name: a folder: one that transformers reads, that `LanguageModel.save` wrote, or of a checkpoint of the paper's,
            of ProSparse, MiniCPM-S or Bamboo; or the name of such a repository on the Hugging Face Hub
            ("SakanaAI/SparseLM0.5B"), which is downloaded unless it is in the Hub's cache. How much is said on stderr
            before, and nothing large is fetched of a model that could not be loaded.
        dtype: of the weights; by default what the checkpoint says.
        device: where the model goes.
        revision: of a repository: a branch, tag or commit.

    Raises:
        InputError: for a dtype that is none, a name that is neither, a repository that cannot be reached, a folder
            without safetensors, weights or thresholds that are missing or do not fit the configuration, and a model
            that needs code of its own.
        DeviceError: for a device that is not there.
        StackError: where transformers is missing.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype is {dtype!r:.80}; a floating-point dtype of torch is accepted, or None")
    place = clock.present_device(device)
    folder = folder_of(name, revision)
    said = configuration(folder)
    if "format" in said:
        model: nn.Module = LanguageModel.load(folder)
    elif _kind(said) in _SPARSE_RELU:
        model = _sparse_relu(folder, said, dtype)
    elif _kind(said) in _FOREIGN:
        model = _foreign(folder, said, dtype)
    else:
        model = _plain(folder, said, dtype)
    if said.get(CONFIG) is not None:
        try:
            Thresholds.read(said[CONFIG], f"{CONFIG} of config.json in {str(folder)!r}").apply(model)
        except RecordError as error:
            raise InputError(str(error)) from error
    return model.to(place, dtype).eval() if dtype is not None else model.to(place).eval()


# ---- where it is ----


def folder_of(name: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder of a model: the one of this name, or a repository's in the Hub's cache. Arguments and errors: as those
    of `load`."""
    if not isinstance(name, (str, os.PathLike)):
        raise InputError(f"name is a {type(name).__name__}; a folder or the name of a repository is accepted")
    shown = os.fspath(name)
    if "\0" not in shown and os.path.isdir(shown):
        return Path(shown)
    if not _ON_HUB.fullmatch(shown):
        raise InputError(
            f"there is no folder {shown!r:.200}; accepted: one, or a repository's name such as 'owner/name'"
        )
    return _fetched(shown, revision)


def _fetched(name: str, revision: str | None) -> Path:
    """The folder of a repository of the Hub in the Hub's cache, downloaded if need be."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise StackError("loading from the Hub needs huggingface_hub: pip install huggingface_hub") from None
    try:
        cached = Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED, local_files_only=True))
        if (cached / "config.json").is_file() and _shards(cached):
            return cached
    except (LocalEntryNotFoundError, HFValidationError, InputError):  # it is not there, or not whole; see below
        pass
    try:
        files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
        wanted = [file for file in files if any(Path(file.rfilename).match(pattern) for pattern in _WANTED)]
        size = sum(file.size or 0 for file in wanted)
        small = Path(snapshot_download(name, revision=revision, allow_patterns=("*.json",)))
        if (small / "config.json").is_file():
            _refuse(small, configuration(small))
        print(
            f"{name}: {len(wanted)} files, {size / 1e9:.2f} GB, from the Hugging Face Hub", file=sys.stderr, flush=True
        )
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    except (InputError, StackError):
        raise
    except Exception as error:  # the Hub's client and the network each raise their own kinds
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"there is no folder {name!r}, and the repository of that name cannot be reached ({type(error).__name__}: "
            f"{reason:.200}); accepted: a folder that is here, or a repository of the Hub, which needs a network"
        ) from error


def _placed(folder: Path) -> dict[str, str]:
    """The file of each weight, as the index says. InputError where it does not."""
    index = read_json(folder / _INDEX, "model")
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not all(
        type(each) is str and Path(each).name == each for each in placed.values()
    ):
        raise InputError(f"{_INDEX} in {str(folder)!r} has no weight_map of file names")
    return placed


def _shards(folder: Path) -> list[Path]:
    """The files with the weights. InputError where there are none, or one is missing."""
    names = sorted(set(_placed(folder).values())) if (folder / _INDEX).is_file() else [_WEIGHTS]
    found = [folder / each for each in names]
    for path in found:
        if not path.is_file():
            raise InputError(
                f"there are no weights in {str(folder)!r}: no {path.name}; safetensors are accepted, and no pickled "
                "weights"
            )
    return found


# ---- what it is ----


def configuration(folder: Path) -> dict:
    """What config.json says. InputError where there is none."""
    said = read_json(folder / "config.json", "model") if (folder / "config.json").is_file() else None
    if not isinstance(said, dict):
        raise InputError(
            f"there is no model in {str(folder)!r}: no config.json with an object; accepted: a folder with one"
        )
    return said


def _kind(said: dict) -> str:
    """Its model_type; "" where it has none that is a word."""
    kind = said.get("model_type")
    if kind is None and said.get("architectures") == ["MiniCPMForCausalLM"]:
        return "minicpm"
    return kind if isinstance(kind, str) else ""


def _refuse(folder: Path, said: dict) -> None:
    """InputError for a model of transformers that cannot be loaded, as far as its small files tell: its weights need
    not be there yet."""
    kind = _kind(said)
    if "format" in said or kind in _SPARSE_RELU:
        return
    if kind in _FOREIGN:
        from . import foreign

        if reason := foreign.obstacle(kind, said):
            raise InputError(f"{reason}: config.json in {str(folder)!r}")
        if names := [name for name in _named(folder) if ".predictor." in name]:
            raise InputError(
                f"{str(folder)!r} has {names[0]}: its layers leave out the neurons that a predictor takes for silent, "
                "which no model here does; accepted: a checkpoint without predictors"
            )
        return
    auto = _transformers().models.auto
    causal = [*auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_SPARSE_RELU, *_FOREIGN]
    if kind not in causal:
        there = kind in auto.configuration_auto.CONFIG_MAPPING
        what = (
            "is no causal language model (load it by its own class of transformers: profile and sparsify take it then)"
            if there
            else "transformers does not know"
        )
        code = ", and the repository's own code is not run" if said.get("auto_map") and not there else ""
        near, own = [] if there else get_close_matches(kind, causal, 3), (*_SPARSE_RELU, *_FOREIGN)
        raise InputError(
            f"model_type is {said.get('model_type')!r:.80} in {str(folder)!r}, which {what}{code}"
            + (f"; close to it: {', '.join(near)}" if near else "")
            + f"; accepted: {', '.join(own)}, and {len(causal) - len(own)} of transformers, which "
            "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES lists"
        )


def _named(folder: Path) -> list[str]:
    """The names of the weights, as far as they are there: of the index, or of the one file's header."""
    if (folder / _INDEX).is_file():
        return sorted(_placed(folder))
    if not (folder / _WEIGHTS).is_file():
        return []
    try:
        with safetensors.safe_open(folder / _WEIGHTS, "pt") as file:
            return sorted(file.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise _unreadable(folder / _WEIGHTS, error) from error


def tokenizer_of(folder: Path):
    """The tokenizer of a model of transformers. InputError where the folder has none that can be read."""
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0].strip().removesuffix(" from one of:")
        raise InputError(
            f"{str(folder)!r} has no tokenizer that transformers can read ({why:.200}); accepted: a folder with the "
            "tokenizer.json that belongs to its model"
        ) from error


def _transformers():
    try:
        import transformers
    except ImportError:
        raise StackError("loading this model needs transformers: pip install transformers") from None
    return transformers


def _plain(folder: Path, said: dict, dtype: torch.dtype | None) -> nn.Module:
    """A model that transformers knows."""
    _refuse(folder, said)
    # Weights of another shape would be drawn like missing ones, but they are named.
    model, found = _from_pretrained(
        _transformers().AutoModelForCausalLM, folder, dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    if wrong := sorted(found["mismatched_keys"]):
        name, here, accepted = wrong[0]
        raise _other_shape(name, folder, here, accepted)
    _refuse_missing(found, folder)
    return model


def _refuse_missing(found: dict, folder: Path) -> None:
    """InputError for weights that the checkpoint lacks: transformers draws them, and says so in a log."""
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more of the model's weights" if missing[1:] else ""
        raise InputError(f"{str(folder)!r} lacks {missing[0]}{more}")


def _other_shape(name: str, folder: Path, here: Iterable[int], accepted: Iterable[int]) -> InputError:
    return InputError(f"{name} in {str(folder)!r} has shape {list(here)}; {list(accepted)} is accepted")


def _foreign(folder: Path, said: dict, dtype: torch.dtype | None) -> nn.Module:
    """A model of twell_lab.models.foreign."""
    _transformers()
    from . import foreign

    _refuse(folder, said)
    kind = foreign.MODELS[_kind(said)]
    entries = {"tie_word_embeddings": _kind(said) == "minicpm"} | said  # where it does not say
    try:
        config = kind.config_class.from_dict({k: v for k, v in entries.items() if k not in ("model_type", "auto_map")})
    except Exception as error:  # the library checks the entries, each in its own way
        raise InputError(f"config.json in {str(folder)!r} is not that of a {_kind(said)}: {error}") from error
    model, found = _from_pretrained(kind, folder, dtype, config=config, output_loading_info=True)
    _refuse_missing(found, folder)
    if unknown := sorted(found["unexpected_keys"]):
        raise InputError(f"{str(folder)!r} has {unknown[0]}, which its configuration has no place for")
    return model


def _from_pretrained(kind, folder: Path, dtype: torch.dtype | None, **how):
    """What kind.from_pretrained gives, from safetensors alone, and without bars where nobody sees them."""
    _shards(folder)
    how |= dict(use_safetensors=True, trust_remote_code=False, local_files_only=True)
    try:
        with quiet():
            return kind.from_pretrained(folder, dtype=dtype or "auto", **how)
    except (
        Exception
    ) as error:  # of files, entries, sizes, and of what a quantised model needs: each raises its own kind
        raise InputError(f"transformers cannot load {str(folder)!r}: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers shows no bars, where stderr is no terminal."""
    bars = _transformers().utils.logging
    if not bars.is_progress_bar_enabled() or sys.stderr.isatty():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def _sparse_relu(folder: Path, said: dict, dtype: torch.dtype | None) -> nn.Module:
    """A model whose feed-forward layers compute a ReLU, whatever its configuration says."""
    library, gated = _transformers(), said.get("sparsity_gated_mlp", True)
    kind = _SPARSE_RELU[said["model_type"]][0 if gated else 1]
    if kind is None:
        raise InputError(f"{said['model_type']} without gates (sparsity_gated_mlp false) has no model in transformers")
    dropped = ("model_type", "architectures", "auto_map", "transformers_version")
    kept = {key: value for key, value in said.items() if not key.startswith("sparsity_") and key not in dropped}
    kept["hidden_act"] = "relu"
    if (wide := said.get("sparsity_new_intermediate_size")) is not None:
        kept["intermediate_size"] = wide
    stored = kept.pop("torch_dtype", None) or kept.pop("dtype", None) or "float32"
    dtype = dtype or getattr(torch, str(stored).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"config.json in {str(folder)!r} says torch_dtype {stored!r:.80}; accepted: a dtype of torch")
    try:
        config = library.AutoConfig.for_model(kind, **kept)
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # the library checks the entries, each in its own way
        raise InputError(f"config.json in {str(folder)!r} is not that of a {kind}: {error}") from error
    weights = _weights(folder)
    if gated and said.get("sparsity_use_hybrid_kernel"):
        weights = {key: t.t() if key.endswith("mlp.down_proj.weight") else t for key, t in weights.items()}
    _fill(model, weights, folder)
    return model


def _weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in _shards(folder):
        try:
            found |= safetensors.torch.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise _unreadable(path, error) from error
    return found


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{str(path)!r} cannot be read: {error}; accepted: a whole safetensors file")


def _fill(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Copy the weights into the model. InputError, naming the first, for one that is missing, unknown or of another
    shape."""
    own = model.state_dict()
    tied = "lm_head.weight" in own and own["lm_head.weight"] is not None and model.config.tie_word_embeddings
    for name, t in own.items():
        if name in weights and weights[name].shape != t.shape:
            raise _other_shape(name, folder, weights[name].shape, t.shape)
        if name not in weights and not (tied and name == "lm_head.weight"):
            raise InputError(f"{str(folder)!r} lacks {name}")
    if unknown := sorted(weights.keys() - own.keys()):
        raise InputError(f"{str(folder)!r} has {unknown[0]}, which its configuration has no place for")
    model.load_state_dict(weights, strict=not tied)
    model.tie_weights()
