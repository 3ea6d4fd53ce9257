"""Small decoders of transformers with random weights: the sixteen families that `generate` was tried on, and two more
whose layers look back through a window, and one whose tokens see those behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twell_lab.models import tiny

VOCABULARY, END = 97, 2
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
_SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=END)
_LLAMA = _SIZES | dict(intermediate_size=48, num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
_WINDOW = _LLAMA | dict(sliding_window=6)
_OF_GPT2 = dict(n_embd=32, n_layer=3, n_head=4, n_positions=128)

# The class of the configuration, and the sizes.
FAMILIES = {
    "Llama": ("LlamaConfig", _LLAMA),
    "Qwen2": ("Qwen2Config", _LLAMA),
    "Qwen3": ("Qwen3Config", _LLAMA),
    "Phi-3": ("Phi3Config", _LLAMA),
    "GPT-2": ("GPT2Config", _SIZES | _OF_GPT2),
    "GPT-NeoX": ("GPTNeoXConfig", _LLAMA),
    "Nemotron": ("NemotronConfig", _LLAMA),
    "OLMo2": ("Olmo2Config", _LLAMA),
    "StableLM": ("StableLmConfig", _LLAMA),
    "Mistral": ("MistralConfig", _WINDOW),
    "Gemma 2": ("Gemma2Config", _WINDOW),
    "Gemma 3": ("Gemma3TextConfig", _WINDOW | dict(num_hidden_layers=4, sliding_window_pattern=2)),
    "Falcon": ("FalconConfig", _SIZES | dict(alibi=False)),
    "Mixtral": ("MixtralConfig", _LLAMA | dict(num_local_experts=4, sliding_window=None)),
    "OPT": ("OPTConfig", _LLAMA | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "Qwen2 with windows": ("Qwen2Config", _WINDOW | dict(use_sliding_window=True, max_window_layers=1)),
    "Bloom": ("BloomConfig", _SIZES | dict(n_layer=3, n_head=4)),
    "Falcon with ALiBi": ("FalconConfig", _SIZES | dict(alibi=True)),
    "BERT, no decoder": ("BertConfig", _SIZES | dict(intermediate_size=48)),
}
PLAIN = (
    "Bloom",
    "Falcon with ALiBi",
    "BERT, no decoder",
)  # never captured: no positions, or tokens that see later ones


def build(name: str, **changes) -> nn.Module:
    """Return a model of the family in float32, whose tokens vary."""
    transformers = pytest.importorskip("transformers")
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes | changes)).float().eval()
    for weight in model.parameters():
        weight.data.mul_(4 if weight.dim() > 1 else 1)
    return model


def of_bytes(processor=None, **marks):
    """Return a tokenizer of transformers whose tokens are bytes. marks: special tokens by their names, from tiny.EDGE;
    processor: the post-processor of the `tokenizers` library."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    content = tokenizers.Tokenizer.from_str(tiny.bytes_tokenizer())
    if processor is not None:
        content.post_processor = processor
    return transformers.PreTrainedTokenizerFast(tokenizer_object=content, **marks)


def prompts(batch: int = 3, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts [batch, tokens], of which the first is not padded, and their mask."""
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : row * 2 % tokens] = 0
    return ids * mask, mask


@torch.no_grad()
def read_anew(model: nn.Module, text: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return prompts [batch, length] and the most likely tokens by a LanguageModel, which reads all that it sees anew
    for each."""
    context = model.config.context
    for _ in range(tokens):
        begin = 0
        while text.shape[1] - begin > context:
            begin += (context + 1) // 2
        text = torch.cat([text, model(text[:, begin:])[:, -1:].argmax(-1)], 1)
    return text
