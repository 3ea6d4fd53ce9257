"""The small model as a LlamaForCausalLM: transformers computes and speaks the same."""

from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import twell_lab as tl
from tests.models.tiny import test_model
from twell_lab.core import InputError
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import EDGE
from twell_lab.training.text import tokenizer
from twell_lab.training.text.source import BYTES

transformers = pytest.importorskip("transformers")
model = partial(test_model.model, vocabulary=256, context=32)


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.mark.parametrize(
    "changes", [{}, {"activation": "relu2", "layers": 1}, {"heads": 1, "d_model": 2, "context": 9}]
)
def test_transformers_computes_and_says_the_same(tmp_path, changes):
    saved = model(**changes)
    tokens = torch.randint(256, (2, 5))
    loaded, saved = theirs(saved.save_pretrained(tmp_path / "new" / "llama")), saved.double()
    with torch.no_grad():
        # Both make the rotary tables in float32.
        torch.testing.assert_close(loaded(tokens).logits, saved(tokens), atol=1e-5, rtol=1e-5)
    said = loaded.generate(tokens[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(said, tl.generate(saved, tokens[:1], max_new_tokens=4))


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_the_tokenizer_of_bytes_gives_the_bytes_and_the_text_back(read_bytes, text):
    assume(EDGE not in text)  # which stands for byte 0
    ids = read_bytes(text).input_ids
    assert bytes(ids) == text.encode() and read_bytes.decode(ids) == text


def test_a_text_has_an_edge_that_is_one_of_the_models_tokens(read_bytes):
    assert {read_bytes.bos_token_id, read_bytes.eos_token_id, read_bytes.pad_token_id} == {0}
    assert len(read_bytes) == 256 and read_bytes.decode([0, 97], skip_special_tokens=True) == "a"


@pytest.fixture(scope="module")
def read_bytes(tmp_path_factory):
    folder = model().save_pretrained(tmp_path_factory.mktemp("llama"))
    assert tokenizer.load(folder / "tokenizer.json") == BYTES
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_of_a_bpe_goes_with_the_model(tmp_path):
    bpe = tokenizer.train([b"some text, some more text, and some more\n" * 20], 280, "text")
    saved = model(vocabulary=bpe.vocabulary)
    saved.save_pretrained(tmp_path, bpe.content)
    text = "some more text\n"
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
    assert ids == bpe.encode([text.encode()]).tolist()
    assert tokenizer.load(tmp_path / "tokenizer.json") == bpe and max(ids) >= 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swapped_model_is_exported_in_its_own_dtype(tmp_path, dtype):
    saved, tokens = model().to(dtype), torch.randint(256, (2, 5))
    wanted = theirs(saved.save_pretrained(tmp_path / "dense"))(tokens).logits
    loaded = tl.load(sparsify(saved, "twell").save_pretrained(tmp_path / "swapped"))
    assert next(loaded.parameters()).dtype == dtype and torch.equal(loaded.double()(tokens).logits, wanted)


def test_plain_layers_have_no_such_form(tmp_path):
    with pytest.raises(InputError, match="gated is False"):
        model(gated=False).save_pretrained(tmp_path / "not")
    assert not (tmp_path / "not").exists()
