"""Dead neurons: how long each has been silent, and the paper's change to the rows of those that died."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from twell_lab.core import InputError
from twell_lab.layers.find import FeedForward, feed_forwards, firing_layers
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training.dead import Tracker, collect_fired, fired_in, reinitialise

SMALL = dict(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=24, context=12)


def model(**changes):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**{**SMALL, **changes}))


def layer(bias=False):
    torch.manual_seed(1)
    gate, up, down = nn.Linear(5, 8, bias), nn.Linear(5, 8, bias), nn.Linear(8, 5, bias)
    return FeedForward("", nn.Module(), gate, up, down)


def masks(*numbers, width=3):
    return [torch.tensor([at in fired for at in range(width)]) for fired in numbers]


# Tracking


def test_a_neuron_is_dead_once_it_was_silent_for_the_whole_window():
    tracker = Tracker([3, 3], window_tokens=100)
    tracker.see(masks({0}, {0, 1, 2}), 60)
    assert [each.tolist() for each in tracker.dead()] == [[False] * 3] * 2  # the window is not full
    tracker.see(masks({0}, {1}), 40)
    assert [each.tolist() for each in tracker.dead()] == [[False, True, True], [False] * 3]
    tracker.see(masks({1}, set()), 60)  # 1 of the first layer is back; 0 and 2 of the second: 100 tokens
    assert [each.tolist() for each in tracker.dead()] == [[False, False, True], [True, False, True]]
    tracker.see(masks(set(), set()), 0)
    assert [silent.tolist() for silent in tracker.silent] == [[60, 0, 160], [100, 60, 100]]


def test_the_counts_go_through_a_checkpoint():
    tracker = Tracker(firing_layers(model()), window_tokens=50)
    tracker.see([torch.rand(24) < 0.5, torch.rand(24) < 0.5], 30)
    again = Tracker([24, 24], window_tokens=50)
    again.load_state_dict(load(save(tracker.state_dict())))
    for each in (tracker, again):
        each.see([torch.arange(24) < 3] * 2, 20)
    assert all(map(torch.equal, tracker.dead(), again.dead())) and any(each.any() for each in again.dead())


def test_counts_of_other_layers_or_another_window_are_refused():
    state = Tracker([4, 5], 10).state_dict()
    with pytest.raises(InputError, match="window of 10 tokens.*11"):
        Tracker([4, 5], 11).load_state_dict(state)
    for widths in ([4], [4, 6], [4, 5, 5]):
        with pytest.raises(InputError, match="shapes"):
            Tracker(widths, 10).load_state_dict(state)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Tracker([], 5), "no layers"),
        (lambda: Tracker([3], 0), "window_tokens is 0"),
        (lambda: Tracker([3.0], 5), "width is 3.0"),
        (lambda: Tracker([3], 5).see(masks({0}, {0}), 1), "shapes"),
        (lambda: Tracker([3], 5).see([torch.ones(3)], 1), "bool"),
        (lambda: Tracker([3], 5).see(masks({0}), -1), "tokens"),
    ],
)
def test_wrong_counts_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


# What fired


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_what_fired_is_what_the_definition_says(gated, activation):
    whole = model(gated=gated, activation=activation)
    tokens = torch.randint(50, (1, 3))
    inputs = []
    hooks = [each.mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0])) for each in whole.layers]
    fired = fired_in(whole, tokens)
    for hook in hooks:
        hook.remove()
    assert not any(module._forward_hooks for module in whole.modules())
    for block, x, got in zip(whole.layers, inputs, fired, strict=True):
        weight = (block.mlp.gate_proj if gated else block.mlp.up_proj).weight
        assert torch.equal(got, (x @ weight.T > 0).flatten(0, 1).any(0)) and 0 < got.sum() < 24
        assert got.dtype == torch.bool and not got.requires_grad


def test_swapped_layers_tell_the_same():
    whole, tokens = model(), torch.randint(50, (1, 3))
    expected = fired_in(whole, tokens)
    assert all(map(torch.equal, fired_in(sparsify(whole, "twell"), tokens), expected))


def test_collecting_gathers_the_micro_batches_of_a_training_step():
    whole = model()
    parts = torch.randint(50, (3, 1, 4))
    single = [fired_in(whole, part) for part in parts]
    with collect_fired(whole) as fired:
        assert not any(each.any() for each in fired())
        for part in parts:
            whole(part).sum().backward()
        together = fired()
        assert not any(each.any() for each in fired())  # begun anew
    for number, got in enumerate(together):
        assert torch.equal(got, single[0][number] | single[1][number] | single[2][number])


# Re-initialising


@pytest.mark.parametrize("bias", [False, True])
def test_dead_rows_move_as_the_papers_equation_says(bias):
    changed, before = layer(bias), layer(bias)
    dead = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0]).bool()
    assert reinitialise(changed, dead, 0.1, 0.02, torch.Generator().manual_seed(7)) == 3
    noise = torch.randn(3, 5, generator=torch.Generator().manual_seed(7))
    expected = before.gate.weight.detach().clone()
    expected[dead] = 0.9 * expected[dead] + 0.1 * 0.02 * noise
    torch.testing.assert_close(changed.gate.weight.detach(), expected)
    assert torch.equal(changed.gate.weight[~dead], before.gate.weight[~dead])
    assert torch.equal(changed.up.weight, before.up.weight) and torch.equal(changed.down.weight, before.down.weight)
    if bias:
        torch.testing.assert_close(changed.gate.bias[dead], 0.9 * before.gate.bias[dead])
        assert torch.equal(changed.gate.bias[~dead], before.gate.bias[~dead])


def test_a_plain_layer_moves_its_up_rows_and_nothing_moves_without_dead_neurons():
    gated = layer()
    plain = FeedForward("", nn.Module(), None, gated.up, gated.down)
    before = gated.up.weight.detach().clone()
    assert reinitialise(plain, torch.zeros(8, dtype=torch.bool), 0.5, 0.02) == 0
    assert torch.equal(gated.up.weight, before)
    assert reinitialise(plain, torch.arange(8) == 3, 0.5, 0.02) == 1
    assert (gated.up.weight != before).any(1).tolist() == [False] * 3 + [True] + [False] * 4


def test_neurons_with_a_gate_that_nothing_opens_come_back():
    """Each step of the paper's shrinks the row by a tenth, until the noise decides its sign."""
    whole, tokens = model(), torch.randint(50, (4, 12))
    first = feed_forwards(whole)[0]
    inputs = []
    hook = whole.layers[0].mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    whole(tokens)
    hook.remove()
    with torch.no_grad():  # a small positive input in front of rows that are all negative
        whole.layers[0].mlp_norm.register_forward_hook(lambda module, args, output: output.abs())
        first.gate.weight[:10] = -first.gate.weight[:10].abs()
    generator = torch.Generator().manual_seed(0)
    assert (~fired_in(whole, tokens)[0]).sum() >= 10
    for _ in range(60):
        reinitialise(first, ~fired_in(whole, tokens)[0], generator=generator)
    assert fired_in(whole, tokens)[0].all()


def test_half_precision_rows_are_mixed_in_float32():
    changed = layer()
    changed.gate.bfloat16()
    before = changed.gate.weight.detach().float()
    reinitialise(changed, torch.ones(8, dtype=torch.bool), 0.1, 0.02, torch.Generator().manual_seed(7))
    noise = torch.randn(8, 5, generator=torch.Generator().manual_seed(7))
    assert torch.equal(changed.gate.weight, (0.9 * before + 0.1 * (noise * 0.02)).bfloat16())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dead": torch.ones(7, dtype=torch.bool)}, "dead is torch.bool \\[7\\]"),
        ({"dead": torch.ones(8)}, "float32"),
        ({"strength": 1.5}, "strength is 1.5"),
        ({"strength": float("nan")}, "strength"),
        ({"sigma": -1.0}, "sigma is -1"),
    ],
)
def test_wrong_arguments_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        reinitialise(layer(), **{"dead": torch.ones(8, dtype=torch.bool), **change})


def test_a_sharded_weight_changes_as_a_whole_one_does():
    """One process is enough to see that the rows land where they belong; tests of the trainer use two."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if dist.is_initialized():
        pytest.skip("a process group is open already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        dead = torch.arange(8) % 3 == 0
        whole, sharded = layer(True), layer(True)
        for name, value in list(sharded.gate.named_parameters()):
            setattr(sharded.gate, name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))
        for each in (whole, sharded):
            reinitialise(each, dead, 0.1, 0.02, torch.Generator().manual_seed(3))
        torch.testing.assert_close(sharded.gate.weight.full_tensor(), whole.gate.weight)
        torch.testing.assert_close(sharded.gate.bias.full_tensor(), whole.gate.bias)
    finally:
        dist.destroy_process_group()
