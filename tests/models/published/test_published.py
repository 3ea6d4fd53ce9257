"""Published checkpoints: small ones, written with the names and entries of the large ones, are loaded as what they
compute, without a network."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

import twell_lab as tl
from twell_lab.core import DeviceError, InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.models import published
from twell_lab.models.tiny import LanguageModel, ModelConfig

transformers = pytest.importorskip("transformers")
SIZES = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    initializer_range=0.5,
    rope_theta=5000.0,
)
TOKENS = torch.arange(14).view(2, 7)


def right(gated=True, kind="llama", **changes):
    """The model that computes what such a checkpoint does."""
    torch.manual_seed(0)
    kind = kind if gated else "arcee"
    config = transformers.AutoConfig.for_model(kind, **SIZES, hidden_act="relu", **changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def written(folder, model, kind="llama_sparse_relu", files=1, transposed=False, **said):
    """The model's files as the paper's trainer writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    wide = {**SIZES, "intermediate_size": 24, "sparsity_new_intermediate_size": 40}
    entries = {
        **wide,
        "model_type": kind,
        "architectures": ["SparseLlamaForCausalLM"],
        "hidden_act": "silu",
        "mlp_bias": model.config.mlp_bias if hasattr(model.config, "mlp_bias") else False,
        "sparsity_gated_mlp": True,
        "sparsity_l1_coeff": 2e-5,
        "sparsity_mlp_execution_logic": "training",
        "torch_dtype": "float32",
        "tie_word_embeddings": model.config.tie_word_embeddings,
        "transformers_version": "4.55.0",
        **said,
    }
    (folder / "config.json").write_text(json.dumps(entries))
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if transposed:
        weights = {n: t.t().contiguous() if n.endswith("mlp.down_proj.weight") else t for n, t in weights.items()}
    names = sorted(weights)
    shards = [names[i::files] for i in range(files)]
    placed = {}
    for number, shard in enumerate(shards):
        file = "model.safetensors" if files == 1 else f"model-{number:05}.safetensors"
        safetensors.torch.save_file({name: weights[name] for name in shard}, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(shard, file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def same(loaded, model):
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    "how, changes",
    [
        ({}, {}),
        ({"files": 3}, {}),
        ({"sparsity_gated_mlp": False}, {"gated": False}),
        ({"transposed": True, "sparsity_use_hybrid_kernel": True}, {}),
        ({}, {"tie_word_embeddings": True}),
        ({}, {"mlp_bias": True}),
        ({"kind": "qwen2_sparse_relu"}, {"kind": "qwen2"}),
    ],
)
def test_a_checkpoint_of_the_papers_computes_a_relu(tmp_path, how, changes):
    model = right(**changes)
    loaded = tl.load(written(tmp_path / "SparseLM", model, **how))
    same(loaded, model)
    assert not loaded.training and loaded.config.hidden_act == "relu" and loaded.dtype == torch.float32
    said = json.loads((tmp_path / "SparseLM" / "config.json").read_text())
    assert said["hidden_act"] == "silu"  # which is not what it computes
    assert len(feed_forwards(loaded)) == 2 and all(
        isinstance(each.module.act_fn, nn.ReLU) for each in feed_forwards(loaded)
    )
    tl.sparsify(loaded, "twell")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)
    tl.densify(loaded).save_pretrained(tmp_path / "saved")
    same(tl.load(str(tmp_path / "saved")), model)  # and from now on transformers reads it as what it is


def test_dtype_and_device(tmp_path):
    folder = written(tmp_path, right(), torch_dtype="bfloat16")
    assert tl.load(folder).dtype == torch.bfloat16
    assert tl.load(folder, dtype=torch.float64, device="cpu").dtype == torch.float64
    for wrong in ("bfloat16", torch.int8, 16):
        with pytest.raises(InputError, match="dtype is .*; a floating-point dtype of torch"):
            tl.load(folder, dtype=wrong)
    with pytest.raises(DeviceError, match="device is 'cuda:99'"):
        tl.load(folder, device="cuda:99")


def test_a_model_of_transformers_and_one_of_ours(tmp_path):
    model = right()
    model.save_pretrained(tmp_path / "llama")
    same(tl.load(tmp_path / "llama"), model)
    ours = LanguageModel(ModelConfig(vocabulary=64, d_model=16, layers=1, heads=2, d_ff=40, context=32)).eval()
    ours.save(tmp_path / "ours")
    loaded = tl.load(tmp_path / "ours")
    assert isinstance(loaded, LanguageModel) and torch.equal(loaded(TOKENS), ours(TOKENS))


DAMAGE = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "a configuration that is a list": (lambda f: (f / "config.json").write_text("[]"), "no config.json with an object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors; safetensors are accepted"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "safetensors are accepted, and no pickled",
    ),
    "half of the file": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "cannot be read",
    ),
    "a weight less": (lambda f: changed(f, lambda w: w.pop("model.norm.weight")), "lacks model.norm.weight"),
    "a weight more": (lambda f: changed(f, lambda w: w.update(more=torch.zeros(1))), "has more, which"),
    "another shape": (
        lambda f: changed(f, lambda w: w.update({"model.norm.weight": torch.zeros(3)})),
        r"model.norm.weight in .* has shape \[3\]; \[16\] is accepted",
    ),
    "an index that leaves the folder": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        "no weight_map of file names",
    ),
    "a shard that is missing": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "no b.safetensors",
    ),
    "no number of heads": (lambda f: said(f, num_attention_heads="many"), "is not that of a llama"),
    "a dtype that torch has not": (lambda f: said(f, torch_dtype="float7"), "says torch_dtype 'float7'"),
    "qwen2 without gates": (
        lambda f: said(f, model_type="qwen2_sparse_relu", sparsity_gated_mlp=False),
        "has no model in transformers",
    ),
    "a kind that is a list": (lambda f: said(f, model_type=["llama"]), r"model_type is \['llama'\]"),
    "another kind": (
        lambda f: said(f, model_type="new", auto_map={"AutoModel": "code.Model"}),
        "model_type is 'new' .* own code is not run; accepted: llama_sparse_relu, .* of transformers",
    ),
}


def changed(folder, change):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors")


def said(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_folder_that_is_damaged_is_told_by_name(tmp_path, damage, message):
    folder = written(tmp_path, right())
    damage(folder)
    with pytest.raises(InputError, match=message):
        tl.load(folder)


@pytest.mark.parametrize(
    "kind, near",
    [
        ("t5", "is no causal language model"),
        ("vit", "load it by its own class of transformers"),  # one letter from git, which is a language model
        ("lama", "close to it: llama"),
        ("mistrel", "mistral"),
    ],
)
def test_a_kind_that_is_no_causal_model_is_told_shortly(tmp_path, kind, near):
    folder = written(tmp_path, right())
    said(folder, model_type=kind)
    with pytest.raises(InputError, match=near) as told:
        tl.load(folder)
    assert "accepted: llama_sparse_relu" in str(told.value) and "of transformers, which" in str(told.value)
    assert ("close to it" in str(told.value)) == (kind in ("lama", "mistrel"))
    assert len(str(told.value).replace(str(folder), "")) < 500


def test_a_model_of_transformers_that_is_damaged(tmp_path):
    right().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="transformers cannot load"):
        tl.load(tmp_path)


K = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop(K), f"lacks {K}$"),
        (lambda w: [w.pop(name) for name in sorted(w) if ".layers.1." in name], "lacks .*layers.1.* and 8 more of the"),
        (lambda w: w.update({K: w[K][:-1].clone()}), rf"{K} in .* has shape \[39, 16\]; \[40, 16\] is accepted"),
    ],
    ids=["one missing", "a layer missing", "another shape"],
)
def test_weights_that_are_not_in_the_checkpoint_are_not_drawn(tmp_path, change, message):
    right().save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=message):
        tl.load(tmp_path)


def test_a_tied_head_is_not_missed(tmp_path):
    model = right(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "model.safetensors")
    same(tl.load(tmp_path), model)


def test_a_configuration_that_contradicts_itself_is_told(tmp_path):
    right().save_pretrained(tmp_path)
    said(tmp_path, num_attention_heads=3)
    with pytest.raises(InputError, match="(?s)transformers cannot load .* attention heads"):
        tl.load(tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("nowhere", "there is no folder 'nowhere'"),
        ("a/b/c", "there is no folder 'a/b/c'; accepted: one, or a repository's name"),
        ("", "there is no folder ''"),
        ("a\0b", "there is no folder"),
        ("a--b/c", "no folder 'a--b/c', and the repository of that name cannot be reached"),
        (3, "name is a int"),
        (None, "name is a NoneType"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(InputError, match=message):
        tl.load(name)


def test_without_a_network_a_repository_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="no folder 'SakanaAI/SparseLM0.5B', and the repository of that name cannot"):
        tl.load("SakanaAI/SparseLM0.5B")


def test_what_is_cached_needs_no_network(tmp_path, monkeypatch):
    import huggingface_hub

    model, asked = right(), []
    folder = written(tmp_path, model)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **how: asked.append((name, how)) or str(folder)
    )
    same(tl.load("SakanaAI/SparseLM0.5B", revision="v1"), model)
    ((name, how),) = asked
    assert name == "SakanaAI/SparseLM0.5B" and how["revision"] == "v1" and how["local_files_only"]
    assert how["allow_patterns"] == published._WANTED and not any("bin" in pattern for pattern in published._WANTED)


def test_the_size_is_said_before_a_download(tmp_path, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder = written(tmp_path, right())
    file = lambda name, size: type("File", (), {"rfilename": name, "size": size})  # noqa: E731
    files = [file("model.safetensors", 2_000_000_000), file("config.json", 900), file("pytorch_model.bin", 9**12)]

    def download(name, local_files_only=False, **how):
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        if how["allow_patterns"] == published._WANTED:
            assert "SakanaAI/SparseLM2B: 2 files, 2.00 GB" in capsys.readouterr().err
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    info = lambda *_, **__: type("Info", (), {"siblings": files})  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    assert tl.load("SakanaAI/SparseLM2B").config.hidden_act == "relu"


def test_a_name_where_a_model_is_expected_is_told_of_load():
    for verb in (tl.sparsify, tl.densify, tl.relufy, tl.feed_forwards):
        with pytest.raises(
            InputError, match=r"expected a torch.nn.Module, got str; .*tl.load\('SakanaAI/SparseLM2B'\)"
        ):
            verb("SakanaAI/SparseLM2B")
