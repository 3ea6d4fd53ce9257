"""Published checkpoints: small ones, written with the names and entries of the large ones, are loaded as what they
compute and saved as what they are, without a network; what would compute something else is refused."""

import json
import socket
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import twell_lab as tl
from twell_lab.core import DeviceError, InputError, StackError
from twell_lab.layers.activations import is_threshold
from twell_lab.layers.find import feed_forwards
from twell_lab.models import published
from twell_lab.models.tiny import LanguageModel, ModelConfig

transformers = pytest.importorskip("transformers")
foreign = pytest.importorskip("twell_lab.models.foreign")
huggingface_hub = pytest.importorskip("huggingface_hub")
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
TOKENS = torch.arange(14).view(2, 7)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def right(kind="llama", **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, "hidden_act": "relu", **changes})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def written(folder, weights, files=1, **entries):
    """A checkpoint with these weights, in so many files, and these entries in its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries))
    names, placed = sorted(weights), {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number:05}.safetensors"
        shard = {name: weights[name].float().contiguous() for name in names[number::files]}
        safetensors.torch.save_file(shard, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(shard, file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def of_the_paper(folder, model, transposed=False, **entries):
    """The model's files as the paper's trainer writes them."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if transposed:
        weights = {name: t.t() if name.endswith("mlp.down_proj.weight") else t for name, t in weights.items()}
    own = {"model_type": "llama_sparse_relu", "architectures": ["SparseLlamaForCausalLM"], "hidden_act": "silu"}
    own |= {"intermediate_size": 24, "sparsity_new_intermediate_size": 40, "sparsity_gated_mlp": True}
    own |= {"mlp_bias": getattr(model.config, "mlp_bias", False), "torch_dtype": "float32"}
    return written(
        folder, weights, **{**SIZES, **own, "tie_word_embeddings": model.config.tie_word_embeddings, **entries}
    )


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


def changed(folder, change):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def said(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    "how, changes",
    [
        ({}, {}),
        ({"files": 3}, {}),
        ({"sparsity_gated_mlp": False}, {"kind": "arcee"}),
        ({"transposed": True, "sparsity_use_hybrid_kernel": True, "files": 2}, {}),
        ({}, {"tie_word_embeddings": True}),
        ({}, {"mlp_bias": True}),
    ],
)
def test_a_checkpoint_of_the_papers_computes_a_relu(tmp_path, how, changes):
    expected = logits(right(**changes))
    loaded = tl.load(of_the_paper(tmp_path / "SparseLM", right(**changes), **how))
    assert torch.equal(logits(loaded), expected)
    assert not loaded.training and loaded.config.hidden_act == "relu" and loaded.dtype == torch.float32
    assert [type(layer.module.act_fn) for layer in feed_forwards(loaded)] == [nn.ReLU] * 2
    tl.sparsify(loaded, "twell")
    torch.testing.assert_close(logits(loaded), expected)
    tl.densify(loaded).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(tl.load(str(tmp_path / "saved"))), expected)  # which transformers reads as what it is


def test_dtype_and_device(tmp_path):
    folder = of_the_paper(tmp_path, right(), torch_dtype="bfloat16")
    assert tl.load(folder).dtype == torch.bfloat16
    assert tl.load(folder, dtype=torch.float64, device="cpu").dtype == torch.float64
    for wrong in ("bfloat16", torch.int8, 16):
        with pytest.raises(InputError, match="dtype is .*; a floating-point dtype of torch"):
            tl.load(folder, dtype=wrong)
    with pytest.raises(DeviceError, match="device is 'cuda:99'"):
        tl.load(folder, device="cuda:99")


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_and_one_of_ours(tmp_path, tied):
    model = right(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "llama")
    assert torch.equal(logits(tl.load(tmp_path / "llama")), logits(model))
    ours = LanguageModel(ModelConfig(vocabulary=64, d_model=16, layers=1, heads=2, d_ff=40, context=32)).eval()
    loaded = tl.load(ours.save(tmp_path / "ours"))
    assert isinstance(loaded, LanguageModel) and torch.equal(loaded(TOKENS), ours(TOKENS))


DAMAGE = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "a configuration that is a list": (lambda f: (f / "config.json").write_text("[]"), "no config.json with an object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors.*accepted: whole safetensors"),
    "pickled weights": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "whole safetensors"),
    "half of the file": (lambda f: (f / "model.safetensors").write_bytes(b"1" * 5000), "whole safetensors"),
    "a weight less": (lambda f: changed(f, lambda w: w.pop("model.norm.weight")), "lacks model.norm.weight"),
    "a weight more": (lambda f: changed(f, lambda w: w.update(more=torch.zeros(1))), "has more, which"),
    "another shape": (
        lambda f: changed(f, lambda w: w.update({"model.norm.weight": torch.zeros(3)})),
        r"model.norm.weight in .* has shape \[3\]; \[32\] is accepted",
    ),
    "no number of heads": (lambda f: said(f, num_attention_heads="many"), "num_attention_heads"),
    "a contradiction": (lambda f: said(f, num_attention_heads=3), "attention heads"),
    "a dtype that torch has not": (lambda f: said(f, torch_dtype="float7"), "float7"),
    "a kind that is a list": (lambda f: said(f, model_type=["llama"]), r"model_type is \['llama'\]"),
    "another kind": (
        lambda f: said(f, model_type="new", auto_map={"AutoModel": "code.Model"}),
        "model_type is 'new' .* own code is not run; accepted: llama_sparse_relu, .* of transformers",
    ),
    "no causal language model": (lambda f: said(f, model_type="t5"), "model_type is 't5' .*their own class"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_a_folder_that_is_damaged_is_told_by_name(tmp_path, damage, message):
    folder = of_the_paper(tmp_path, right())
    damage(folder)
    with pytest.raises(InputError, match=f"(?s){message}"):
        tl.load(folder)


# ---- those of others: the entries of the large ones' config.json that say what is computed

FAT = {"hidden_act": "fatrelu", "rope_scaling": None}
PROSPARSE = FAT | {"hidden_act_param": 0.25, "model_type": "sparsellama", "tie_word_embeddings": False}
PROSPARSE |= {"auto_map": {"AutoModelForCausalLM": "modeling_sparsellama.SparseLlamaForCausalLM"}}
MINICPM = FAT | {"hidden_act_param": 0.3, "scale_emb": 12, "dim_model_base": 8, "scale_depth": 1.4}
MINICPM |= {"architectures": ["MiniCPMForCausalLM"]}
MINICPM |= {"auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"}}
BAMBOO = {"hidden_act": "relu", "model_type": "bamboo", "sliding_window": 8, "tie_word_embeddings": False}
BAMBOO |= {"architectures": ["BambooForCausalLM"], "rope_theta": 10000.0}
RELULLAMA = {"hidden_act": "relu", "model_type": "llama", "rope_scaling": None, "tie_word_embeddings": False}
SPARSING_LAW = {key: value for key, value in MINICPM.items() if key != "hidden_act_param"} | {"hidden_act": "relu"}
OTHERS = [RELULLAMA, PROSPARSE, MINICPM, BAMBOO, SPARSING_LAW]


class Plain(nn.Module):
    """What the feed-forward layer of such a model computes, spelled out."""

    def __init__(self, mlp, entries):
        super().__init__()
        self.mlp, self.least = mlp, entries.get("hidden_act_param", 0.0)
        self.both = entries.get("model_type") == "bamboo"

    def forward(self, x):
        gate, up = self.mlp.gate_proj(x), self.mlp.up_proj(x)
        gate = gate * (gate >= self.least)
        return self.mlp.down_proj(gate * (up.clamp(min=0) if self.both else up))


def of_others(folder, entries):
    """A checkpoint, and the logits of the model that computes what is written of it, in float64."""
    tied, both = entries.get("architectures") == ["MiniCPMForCausalLM"], entries.get("model_type") == "bamboo"
    extra = {key: entries[key] for key in ("sliding_window", "rope_theta") if key in entries}
    model = right("mistral" if both else "llama", tie_word_embeddings=False, rms_norm_eps=1e-5, **extra).double()
    weights = dict(model.state_dict())
    if tied:
        del weights["lm_head.weight"]
        model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    written(folder, weights, files=2, **SIZES | {"rms_norm_eps": 1e-5, "torch_dtype": "float32"} | entries)
    for layer in model.model.layers:
        layer.mlp = Plain(layer.mlp, entries)
    if tied:  # its scales, multiplied into the weights of a Llama
        branch = entries["scale_depth"] / SIZES["num_hidden_layers"] ** 0.5
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight *= branch
                layer.mlp.mlp.down_proj.weight *= branch
            model.model.embed_tokens.weight *= entries["scale_emb"]
            model.lm_head.weight /= SIZES["hidden_size"] / entries["dim_model_base"]
    return folder, logits(model)


@pytest.mark.parametrize("entries", OTHERS, ids=["ReluLLaMA", "ProSparse", "MiniCPM-S", "Bamboo", "Sparsing Law"])
def test_it_computes_what_is_written_of_it_swapped_and_saved_too(tmp_path, entries):
    folder, expected = of_others(tmp_path / "model", entries)
    model = tl.load(folder)
    before, layers = logits(model), feed_forwards(model)
    torch.testing.assert_close(before.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(tl.load(folder, dtype=torch.float64)), expected, rtol=1e-6, atol=1e-6)
    if entries["hidden_act"] == "fatrelu":
        assert all(is_threshold(layer.acts) and layer.acts.threshold == entries["hidden_act_param"] for layer in layers)
        kept = [layer.acts(layer.gate.weight.new_tensor([-1.0, layer.acts.threshold])).tolist() for layer in layers]
        assert kept == [[0.0, pytest.approx(entries["hidden_act_param"])]] * 2  # the threshold itself is kept
    tl.sparsify(model, "twell")
    torch.testing.assert_close(logits(model), before)
    assert all(layer.module.acts is not None for layer in feed_forwards(model))
    tl.densify(model).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(tl.load(tmp_path / "saved")), before)
    if entries is not RELULLAMA:  # which transformers reads as what it is
        with pytest.raises((ValueError, KeyError)):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)


WRONG = [
    (PROSPARSE, {"hidden_act": "shiftrelu"}, "hidden_act is 'shiftrelu'"),
    (PROSPARSE, {"hidden_act_param": None}, "hidden_act_param is None"),
    (MINICPM, {"scale_emb": None}, "scale_emb is None"),
    (MINICPM, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling is .*; none is accepted"),
    (MINICPM, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    (BAMBOO, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    (PROSPARSE, {"hidden_size": "wide"}, "hidden_size"),
    (MINICPM, {"architectures": ["MiniCPM"]}, "model_type is None .* accepted: .*, sparsellama, minicpm, bamboo"),
    (BAMBOO, {"model_type": "turbosparsemixtral"}, "model_type is 'turbosparsemixtral'"),
]


@pytest.mark.parametrize("entries, changes, message", WRONG, ids=[message for *_, message in WRONG])
def test_what_would_compute_something_else_is_refused(tmp_path, entries, changes, message):
    folder, _ = of_others(tmp_path / "model", entries)
    said(folder, **changes)
    with pytest.raises(InputError, match=message):
        tl.load(folder)


def test_layers_with_a_predictor_of_their_own_are_refused(tmp_path):
    folder, _ = of_others(tmp_path / "model", BAMBOO)
    more = {"model.layers.0.mlp.predictor.fc1.weight": torch.zeros(4, 32)}
    weights = {
        name: t for path in folder.glob("*.safetensors") for name, t in safetensors.torch.load_file(path).items()
    }
    written(folder, weights | more, files=2, **json.loads((folder / "config.json").read_text()))
    with pytest.raises(InputError, match="has model.layers.0.mlp.predictor.fc1.weight"):
        tl.load(folder)


@pytest.mark.parametrize(
    "name, message",
    [
        ("nowhere", "there is no folder 'nowhere'"),
        ("a/b/c", "there is no folder 'a/b/c'; accepted: one, or a repository's name"),
        ("a--b/c", "no folder 'a--b/c', and the repository of that name cannot be reached"),
        ("SakanaAI/SparseLM0.5B", "no folder 'SakanaAI/SparseLM0.5B', and the repository of that name cannot"),
        (3, "name is a int"),
    ],
)
def test_names_that_are_none(name, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=message):
        tl.load(name)


@pytest.mark.parametrize("kind, fetched", [("llama_sparse_relu", 2), ("turbosparsemixtral", 1)])
def test_of_a_repository_nothing_large_is_fetched_that_cannot_be_loaded(kind, fetched, tmp_path, monkeypatch):
    model, asked = right(), []
    folder = of_the_paper(tmp_path, model, model_type=kind)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **how: asked.append((a, how)) or str(folder))
    if fetched == 2:
        assert torch.equal(logits(tl.load("SakanaAI/SparseLM0.5B", revision="v1")), logits(model))
    else:
        with pytest.raises(InputError, match="model_type is 'turbosparsemixtral'"):
            tl.load("SakanaAI/SparseLM0.5B", revision="v1")
    assert [how["allow_patterns"] for _, how in asked] == ["*.json", published._WANTED][:fetched]
    assert all(name == ("SakanaAI/SparseLM0.5B",) and how["revision"] == "v1" for name, how in asked)
    assert not any("bin" in pattern for pattern in published._WANTED)


def test_without_transformers_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StackError, match="needs the transformers library"):
        tl.load(of_the_paper(tmp_path, right()))
