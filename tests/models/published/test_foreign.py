"""Published ReLU models that transformers does not know: small checkpoints with the entries and names of the large ones
compute what is written of them, are saved as what they are, and are refused where they would compute something else."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

import twell_lab as tl
from twell_lab.core import InputError, StackError
from twell_lab.layers.activations import is_threshold
from twell_lab.layers.find import feed_forwards
from twell_lab.models import published

transformers = pytest.importorskip("transformers")
foreign = pytest.importorskip("twell_lab.models.foreign")
TOKENS = torch.arange(20).view(2, 10)
SIZES = dict(
    bos_token_id=1,
    eos_token_id=2,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    rms_norm_eps=1e-5,
    torch_dtype="float32",
    use_cache=True,
)
# The entries of the large ones' config.json that say what is computed.
PROSPARSE = {
    "_name_or_path": "SparseLLM/prosparse-llama-2-7b",
    "architectures": ["SparseLlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_sparsellama.SparseLlamaForCausalLM"},
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.25,
    "model_type": "sparsellama",
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.31.0.dev0",
    "max_length": 64,
}
MINICPM = {
    "_name_or_path": "openbmb/ProSparse-MiniCPM-1B-sft",
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.3,
    "rope_scaling": None,
    "transformers_version": "4.36.0",
    "scale_emb": 12,
    "dim_model_base": 8,
    "scale_depth": 1.4,
}
BAMBOO = {
    "architectures": ["BambooForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM"},
    "hidden_act": "relu",
    "model_type": "bamboo",
    "rope_theta": 10000.0,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "transformers_version": "4.34.0.dev0",
}
RELULLAMA = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "relu",
    "max_length": 64,
    "model_type": "llama",
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.31.0",
}
SPARSING_LAW = {key: value for key, value in MINICPM.items() if key != "hidden_act_param"} | {"hidden_act": "relu"}
ALL = {
    "ReluLLaMA": RELULLAMA,
    "ProSparse": PROSPARSE,
    "MiniCPM-S": MINICPM,
    "Bamboo": BAMBOO,
    "Sparsing Law": SPARSING_LAW,
}


class Plain(nn.Module):
    """What the feed-forward layer of such a model computes, spelled out."""

    def __init__(self, mlp, said):
        super().__init__()
        self.mlp, self.least = mlp, said.get("hidden_act_param", 0.0)
        self.both = said.get("model_type") == "bamboo"

    def forward(self, x):
        gate, up = self.mlp.gate_proj(x), self.mlp.up_proj(x)
        gate = gate * (gate >= self.least)
        return self.mlp.down_proj(gate * (up.clamp(min=0) if self.both else up))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def written(folder, said, **changes):
    """A checkpoint, and the model that computes what is written of it: its logits on TOKENS, in float64."""
    torch.manual_seed(0)
    said = {**SIZES, **said, **changes}
    kind = "mistral" if said.get("model_type") == "bamboo" else "llama"
    sizes = {key: said[key] for key in SIZES if key != "torch_dtype"} | {"hidden_act": "relu"}
    extra = {key: said[key] for key in ("sliding_window", "rope_theta") if key in said}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **sizes, **extra, tie_word_embeddings=False)
    ).double()
    tied = said.get("architectures") == ["MiniCPMForCausalLM"]
    if tied:
        model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    weights = {name: t.float().contiguous() for name, t in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    names = sorted(weights)
    placed = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        here = {name: weights[name] for name in names if placed[name] == file}
        safetensors.torch.save_file(here, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    for layer in model.model.layers:
        layer.mlp = Plain(layer.mlp, said)
    if tied:  # its scales, multiplied into the weights of a Llama
        branch = said["scale_depth"] / said["num_hidden_layers"] ** 0.5
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight *= branch
                layer.mlp.mlp.down_proj.weight *= branch
            model.model.embed_tokens.weight *= said["scale_emb"]
            model.lm_head.weight /= said["hidden_size"] / said["dim_model_base"]
    return folder, logits(model)


@pytest.mark.parametrize("said", ALL.values(), ids=ALL.keys())
def test_it_computes_what_is_written_of_it_swapped_and_saved_too(tmp_path, said):
    folder, expected = written(tmp_path / "model", said)
    model = tl.load(folder)
    assert model.dtype == torch.float32 and not model.training
    before = logits(model)
    torch.testing.assert_close(before.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(tl.load(folder, dtype=torch.float64)), expected, rtol=1e-6, atol=1e-6)
    layers = feed_forwards(model)
    assert len(layers) == 3
    if "fatrelu" in said.values():
        assert all(is_threshold(layer.acts) and layer.acts.threshold == said["hidden_act_param"] for layer in layers)
    tl.sparsify(model, "twell")
    torch.testing.assert_close(logits(model), before)
    assert not any(layer.module.dense_alone for layer in feed_forwards(model))
    tl.densify(model).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(tl.load(tmp_path / "saved")), before)
    if said is not RELULLAMA:  # which transformers reads as what it is
        with pytest.raises((ValueError, KeyError)):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)


def test_what_load_takes_for_foreign_is():
    assert set(published._FOREIGN) == set(foreign.MODELS)


def test_a_value_at_the_threshold_is_kept(tmp_path):
    folder, _ = written(tmp_path / "model", PROSPARSE)
    act = feed_forwards(tl.load(folder))[0].acts
    x = torch.tensor([-1.0, 0.0, 0.2499, 0.25, 0.2501, float("nan"), float("inf")])
    assert torch.equal(act(x), torch.tensor([0, 0, 0, 0.25, 0.2501, 0, float("inf")]))
    assert act(x.bfloat16()).dtype == torch.bfloat16
    assert "threshold=0.25" in repr(act)


def test_a_profile_counts_what_the_threshold_keeps(tmp_path):
    folder, _ = written(tmp_path / "model", PROSPARSE)
    model = tl.load(folder)
    gates = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: gates.append(args[2]))
    logits(model)
    found = tl.profile(tl.load(folder), TOKENS).layers[0]
    assert torch.equal(found.neuron_counts, (gates[0] >= 0.25).flatten(0, 1).sum(0))


WRONG = {
    "another activation": (PROSPARSE, {"hidden_act": "shiftrelu"}, "hidden_act is 'shiftrelu'; 'relu' and 'fatrelu'"),
    "no threshold": (PROSPARSE, {"hidden_act_param": None}, "hidden_act_param is None; a finite number from 0 up"),
    "a negative threshold": (MINICPM, {"hidden_act_param": -1}, "hidden_act_param is -1"),
    "a threshold that is true": (PROSPARSE, {"hidden_act_param": True}, "hidden_act_param is True"),
    "no scale": (MINICPM, {"scale_emb": None}, "scale_emb is None; a positive number"),
    "scaled positions": (MINICPM, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling is .*; none is accepted"),
    "a MiniCPM that fires smoothly": (MINICPM, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    "a Bamboo that fires smoothly": (BAMBOO, {"hidden_act": "silu"}, "hidden_act is 'silu'; 'relu' is accepted"),
    "sizes that are none": (PROSPARSE, {"hidden_size": "wide"}, "is not that of a sparsellama"),
    "an architecture of others": (
        MINICPM,
        {"architectures": ["MiniCPM"]},
        "model_type is None .* own code is not run; accepted: .*, sparsellama, minicpm, bamboo",
    ),
    "experts with predictors": (BAMBOO, {"model_type": "turbosparsemixtral"}, "model_type is 'turbosparsemixtral'"),
}


@pytest.mark.parametrize("said, changes, message", WRONG.values(), ids=WRONG.keys())
def test_what_would_compute_something_else_is_refused(tmp_path, said, changes, message):
    folder, _ = written(tmp_path / "model", said)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=message):
        tl.load(folder)


def test_weights_that_do_not_fit(tmp_path):
    folder, _ = written(tmp_path / "model", BAMBOO)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    shard = folder / whole["weight_map"]["model.norm.weight"]
    weights = safetensors.torch.load_file(shard)

    def refused(message, **changes):
        changed = {name: t for name, t in (weights | changes).items() if t is not None}
        safetensors.torch.save_file(changed, shard, {"format": "pt"})
        named = [name for name in (whole["weight_map"] | changes) if name in changed or name not in weights]
        index.write_text(
            json.dumps({"metadata": {}, "weight_map": {n: whole["weight_map"].get(n, shard.name) for n in named}})
        )
        with pytest.raises(InputError, match=message):
            tl.load(folder)

    refused("lacks model.norm.weight", **{"model.norm.weight": None})
    refused("has more, which its configuration has no place for", more=torch.zeros(2))
    refused(r"has shape \[3\]; \[32\] is accepted", **{"model.norm.weight": torch.zeros(3)})
    refused(
        "has model.layers.0.mlp.predictor.fc1.weight: .* without predictors",
        **{"model.layers.0.mlp.predictor.fc1.weight": torch.zeros(4, 32)},
    )


def test_nothing_large_is_fetched_of_a_model_that_cannot_be_loaded(tmp_path, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder, _ = written(tmp_path / "model", BAMBOO, model_type="turbosparsemixtral")
    fetched = []

    def download(name, local_files_only=False, allow_patterns=None, **_):
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        fetched.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    info = lambda *_, **__: type("Info", (), {"siblings": []})  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    with pytest.raises(InputError, match="model_type is 'turbosparsemixtral'"):
        tl.load("PowerInfer/TurboSparse-Mixtral")
    assert fetched == ["*.json"] and not capsys.readouterr().err


def test_without_transformers_it_is_named(tmp_path, monkeypatch):
    folder, _ = written(tmp_path / "model", PROSPARSE)

    def missing():
        raise StackError("loading this model needs transformers: pip install transformers")

    monkeypatch.setattr(published, "_transformers", missing)
    with pytest.raises(StackError, match="needs transformers"):
        tl.load(folder)
