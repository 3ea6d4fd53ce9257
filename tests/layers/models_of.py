"""Small models with random weights, one of each family that twell_lab.layers.families knows, with ReLU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twell_lab.layers.sparse_ffn import SparseFFN

VOCABULARY = 64
BERT = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2)
BERT |= dict(max_position_embeddings=32, hidden_act="relu")
LLAMA = BERT | dict(num_key_value_heads=2, head_dim=8)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, n_inner=40)
GPT2["activation_function"] = "relu"
BLOOM = dict(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
T5 = dict(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=40, num_layers=2, num_heads=2, decoder_start_token_id=0)
IMAGE = dict(image_size=8, patch_size=4, num_channels=1)
WAVES = dict(conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(4, 4), num_feat_extract_layers=2, layerdrop=0.0)
WAVES |= dict(activation_dropout=0.0, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0)
EXPERTS = LLAMA | dict(moe_intermediate_size=24, num_experts_per_tok=2)
DEEPSEEK = EXPERTS | dict(n_routed_experts=4) | dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1)
DEEPSEEK |= dict.fromkeys("q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim".split(), 8)

# The class of the model, and its configuration.
MODELS = {
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", LLAMA),
    "Gemma2": ("Gemma2ForCausalLM", LLAMA | dict(hidden_activation="relu", sliding_window=8)),
    "Nemotron": ("NemotronForCausalLM", LLAMA | dict(hidden_act="relu2")),
    "Arcee": ("ArceeForCausalLM", LLAMA | dict(hidden_act="relu2", mlp_bias=True)),
    "plain Arcee": ("ArceeForCausalLM", LLAMA),
    "squared BERT": ("BertForMaskedLM", BERT | dict(hidden_act="relu2")),
    "squared GPT-2": ("GPT2LMHeadModel", GPT2 | dict(activation_function="relu2")),
    "MPT": ("MptForCausalLM", dict(vocab_size=VOCABULARY, d_model=16, n_layers=2, n_heads=2, max_seq_len=32)),
    "Phi-3": ("Phi3ForCausalLM", LLAMA),
    "GLM-4": ("Glm4ForCausalLM", LLAMA),
    "ModernBERT": ("ModernBertForMaskedLM", BERT | dict(hidden_activation="relu", mlp_dropout=0.1, mlp_bias=True)),
    "OPT": ("OPTForCausalLM", LLAMA | dict(ffn_dim=40, word_embed_proj_dim=16, activation_function="relu")),
    "Phi": ("PhiForCausalLM", LLAMA),
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", GPT2),
    "GPT-J": ("GPTJForCausalLM", GPT2 | dict(rotary_dim=4)),
    "StarCoder2": ("Starcoder2ForCausalLM", LLAMA | dict(residual_dropout=0.1)),
    "GPT-NeoX": ("GPTNeoXForCausalLM", LLAMA),
    "Falcon": ("FalconForCausalLM", BERT | dict(activation="relu", bias=True, ffn_hidden_size=40)),
    "Bloom": ("BloomForCausalLM", BLOOM),
    "T5": ("T5ForConditionalGeneration", T5 | dict(feed_forward_proj="relu")),
    "gated T5": ("T5ForConditionalGeneration", T5 | dict(feed_forward_proj="gated-relu")),
    "BERT": ("BertForMaskedLM", BERT),
    "RoBERTa": ("RobertaForMaskedLM", BERT),
    "ALBERT": ("AlbertForMaskedLM", BERT | dict(embedding_size=16)),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        dict(vocab_size=VOCABULARY, dim=16, hidden_dim=40, n_layers=2, n_heads=2, activation="relu"),
    ),
    "ViT": ("ViTForImageClassification", BERT | IMAGE),
    "BEiT": ("BeitForImageClassification", BERT | IMAGE),
    "Mixtral": ("MixtralForCausalLM", EXPERTS | dict(num_local_experts=4)),
    "OLMoE": ("OlmoeForCausalLM", EXPERTS | dict(num_experts=4)),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=12)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "Wav2Vec2": ("Wav2Vec2ForCTC", BERT | WAVES),
}
CAUSAL = [name for name, (kind, _) in MODELS.items() if "Causal" in kind or "LMHead" in kind or "Conditional" in kind]
# Their activation stands in their code, not in their configuration.
CODED = ("MPT", "Bloom")


def build(name: str, dtype: torch.dtype = torch.float32, act: str = "relu", **changes) -> nn.Module:
    """The same model each time, in evaluation mode. No weight and no bias is zero or so small that it would not be
    missed. act: what its configuration calls the activation. changes: of its configuration."""
    transformers = pytest.importorskip("transformers")
    kind, settings = MODELS[name]
    settings = {
        key: each.replace("relu2", "relu").replace("relu", act) if act != "relu" and isinstance(each, str) else each
        for key, each in settings.items()
    }
    config = getattr(transformers, kind).config_class(**settings | dict(bos_token_id=1, pad_token_id=0) | changes)
    config.eos_token_id = config.sep_token_id = None
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # torch's grouped products take no float64
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4) if p.dim() > 1 else p.normal_(mean=p.mean().item(), std=0.2)
    if name in CODED and act == "relu":
        relu(model)
    return model


def relu(model: nn.Module) -> None:
    """Put a ReLU where the code of a model has another activation."""
    for module in model.modules():
        for seat in ("gelu_impl", "act"):
            if isinstance(getattr(module, seat, None), nn.Module):
                setattr(module, seat, nn.ReLU())


def given(model: nn.Module) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    name = model.main_input_name
    if name == "pixel_values":
        return {name: torch.randn(2, 1, 8, 8, generator=draw).to(model.dtype)}
    if name == "input_values":
        return {name: torch.randn(2, 400, generator=draw).to(model.dtype)}
    tokens = torch.randint(2, VOCABULARY, (2, 9), generator=draw)
    more = {"decoder_input_ids": tokens[:, :5]} if model.config.is_encoder_decoder else {}
    return {name: tokens, "attention_mask": torch.ones_like(tokens), **more}


def logits(model: nn.Module) -> torch.Tensor:
    return model(**given(model)).logits


def sparse_layers(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, SparseFFN)]
