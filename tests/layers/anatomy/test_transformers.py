"""Every class of the installed transformers with the parts of a feed-forward layer: exact once it is swapped, or
refused."""

import importlib.util
import inspect
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.layers import anatomy
from twell_lab.layers.experts import experts_of, stored
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify

pytest.importorskip("transformers")
spec = importlib.util.spec_from_file_location("of_transformers", Path(__file__).with_name("of_transformers.py"))
of_transformers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(of_transformers)


def answers(layer, width):
    """What a layer, or a decoder layer whole, gives for a few inputs, in both modes; its random numbers are the same
    each time."""
    wanted = list(inspect.signature(layer.forward).parameters.values())[1:]
    needed = [each.name for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    given = []
    for mode in (True, False):
        layer.train(mode)
        for scale in (0.1, 5.0, 300.0):
            torch.manual_seed(7)
            x = scale * torch.randn(2, 6, width)
            if (routed := stored(layer)) is not None:
                chosen = torch.rand(12, routed[0]).argsort(1)[:, :2]
                with torch.no_grad():
                    given.append(layer(x.flatten(0, 1), chosen, torch.rand(chosen.shape)))
                continue
            with torch.no_grad():
                try:
                    found = layer(x, *others(needed, x))
                except (ValueError, IndexError, RuntimeError):  # experts take tokens without a batch
                    found = layer(x.flatten(0, 1), *others(needed, x.flatten(0, 1)))
            given += [
                each for each in (found if isinstance(found, tuple) else [found]) if isinstance(each, torch.Tensor)
            ]
    return given


def others(needed, x):
    """What a forward needs besides x: a residual, or None."""
    return [x.clone() if name == "residual" else None for name in needed]


def outcome(module, name):
    """What becomes of a class that can be built: "exact" or "refused". AssertionError if it computes something else once
    it is swapped."""
    try:
        layer = of_transformers.build(module, name)
    except Exception as error:  # whatever a constructor raises that was given too little
        return f"not built: {error}"
    one = experts_of(layer)[0] if stored(layer) else layer
    width = anatomy.family_of(one).parts(one)[1].in_features
    before = {key: id(value) for key, value in layer.state_dict(keep_vars=True).items()}
    try:
        expected = answers(layer, width)
        sparse = sparsify(layer, "twell")
    except InputError:
        kept = {key: id(value) for key, value in layer.state_dict(keep_vars=True).items()}
        assert kept == before and not any(isinstance(each, SparseFFN) for each in layer.modules()), (
            f"{name} was changed"
        )
        return "refused"
    except Exception as error:  # it cannot be run on x alone: then it must be refused
        with pytest.raises(InputError):
            sparsify(layer, "twell")
        return f"refused: {error}"
    if isinstance(sparse, SparseFFN):
        assert {key: id(value) for key, value in sparse.state_dict(keep_vars=True).items()} == before, name
    found = answers(sparse, width)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item(), equal_nan=True, msg=lambda m: f"{name}: {m}"
        )
    densify(sparse)
    return "exact"


def test_every_class_is_exact_or_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {f"{module}.{name}": outcome(module, name) for module, name in of_transformers.classes()}
    counts = Counter(each.partition(":")[0] for each in found.values())
    unbuilt = {name: each for name, each in found.items() if each.startswith("not built")}
    print(f"{len(found)} classes: {dict(counts)}")
    print("exact:", *sorted(name.rpartition(".")[2] for name, each in found.items() if each == "exact"))
    assert len(found) > 100 and counts["exact"] > 0.7 * len(found), counts
    assert len(unbuilt) < 0.05 * len(found), unbuilt
    by_class = {name.rpartition(".")[2]: each.partition(":")[0] for name, each in found.items()}
    for name in ("BitNetMLP", "DeepseekV4MLP", "Gemma3nTextMLP", "Kosmos2TextFFN", "GptOssExperts"):
        assert by_class.get(name) != "exact", name
    for name in (
        *("LlamaMLP", "Qwen2MLP", "GemmaMLP", "OPTDecoderLayer", "BartEncoderLayer", "CLIPMLP", "ViTMLP", "Phi3MLP"),
        *("GPT2MLP", "Starcoder2MLP", "GPTNeoXMLP", "FalconMLP", "BloomMLP", "MptMLP", "T5DenseActDense", "BertLayer"),
        *("T5DenseGatedActDense", "MixtralExperts", "OlmoeExperts", "Qwen2MoeExperts", "DeepseekV3Experts"),
    ):
        assert by_class[name] == "exact", name


def small(family, **changes):
    import transformers

    sizes = dict(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        hidden_act="relu",
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.randint(2, 60, (2, 9), generator=torch.Generator().manual_seed(3))).logits


@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3", "Olmo2", "Granite", "Qwen2Moe"]
)
def test_a_whole_model_is_exact(family):
    act = {"Gemma": "hidden_activation", "Gemma2": "hidden_activation"}.get(family, "hidden_act")
    experts = (
        dict(num_experts=4, shared_expert_intermediate_size=12, moe_intermediate_size=12)
        if family.endswith("Moe")
        else {}
    )
    model = small(family, **{act: "relu"}, **experts)
    expected = logits(model)
    sparsify(model, "twell")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert any(isinstance(each, SparseFFN) for each in model.modules())


def test_multipliers_of_one_are_none_and_others_are_refused():
    sizes = dict(mamba_n_heads=2, mamba_d_head=16, mamba_d_ssm=32, mamba_d_state=8, mamba_expand=2)
    assert any(
        isinstance(each, SparseFFN)
        for each in sparsify(small("FalconH1", mlp_multipliers=[1.0, 1.0], **sizes), "twell").modules()
    )
    for multipliers in ([0.7, 1.0], [1.0, 0.9]):
        with pytest.raises(InputError, match="FalconH1MLP. does not compute"):
            sparsify(small("FalconH1", mlp_multipliers=multipliers, **sizes), "twell")


def test_the_layers_with_a_top_k_alone_are_named():
    model = torch.nn.ModuleList(
        of_transformers.build("transformers.models.gemma3n.modeling_gemma3n", "Gemma3nTextMLP") for _ in range(3)
    )
    assert model[1].activation_sparsity > 0
    model[0].activation_sparsity = model[2].activation_sparsity = 0.0
    with pytest.raises(InputError, match=r"1 \(Gemma3nTextMLP\) does not compute") as caught:
        sparsify(model, "twell")
    assert "0 (" not in str(caught.value) and "2 (" not in str(caught.value)
    sparsify(model, "twell", only=lambda name, module: getattr(module, "activation_sparsity", 0) == 0)
    assert [isinstance(each, SparseFFN) for each in model] == [True, False, True]


@pytest.mark.parametrize(
    "family, name", [("bart", "BartEncoderLayer"), ("bart", "BartDecoderLayer"), ("detr", "DetrMLP")]
)
def test_dropout_between_the_parts_is_refused_unless_it_drops_nothing(family, name):
    layer = of_transformers.build(f"transformers.models.{family}.modeling_{family}", name)
    layer.activation_dropout = 0.1
    with pytest.raises(InputError, match="in training mode .*p=0"):
        sparsify(layer, "twell")
    layer.activation_dropout = 0.0
    sparsify(layer, "twell")
