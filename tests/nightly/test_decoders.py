"""What the ordinary tests of `tl.generate` leave out: the other families, and continuous batching."""

import pytest
import torch

import twell_lab as tl
from tests.models.speaking import decoders
from tests.models.speaking import test_generate as ordinary
from tests.models.speaking.test_generate import loop  # noqa: F401

SEEN = (*ordinary.GRAPHS, *decoders.PLAIN)
OTHERS = [name for name in decoders.FAMILIES if name not in ordinary.FAMILIES]


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_says_what_its_own_generate_says(loop, name):  # noqa: F811
    ordinary.test_a_family_says_what_its_own_generate_says(loop, name)


@pytest.mark.parametrize("name", [name for name in decoders.FAMILIES if name not in SEEN])
def test_a_step_of_a_family_is_one_graph_to_the_compiler(loop, name):  # noqa: F811
    ordinary.test_a_step_of_a_family_is_one_graph_to_the_compiler(loop, name)


def test_continuous_batching_runs_with_swapped_layers():
    """transformers' generate_batch on requests of several lengths: the tokens of each alone, dense and swapped."""
    transformers = pytest.importorskip("transformers")
    model = decoders.build("Llama", hidden_act="relu").requires_grad_(False)
    requests = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11] * 9]
    wanted = [ordinary.own(model, torch.tensor([ids]), None, 10)[0, len(ids) :].tolist() for ids in requests]
    config = transformers.GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0)
    cache = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)  # else most of the memory
    for swapped in (False, True):
        tl.sparsify(model, "twell") if swapped else None
        said = model.generate_batch(requests, config, continuous_batching_config=cache)
        assert [one.generated_tokens for one in said.values()] == wanted, swapped
