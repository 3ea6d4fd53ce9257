"""Dead neurons: the paper's change to the rows of those that died. test_options.py has who counts as dead."""

import pytest
import torch
from torch import nn

from twell_lab.layers.find import FeedForward
from twell_lab.training.dead import reinitialise


def layer(bias=False):
    torch.manual_seed(1)
    gate, up, down = nn.Linear(5, 8, bias), nn.Linear(5, 8, bias), nn.Linear(8, 5, bias)
    return FeedForward("", nn.Module(), gate, up, down)


def drawn():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("bias", [False, True])
def test_dead_rows_move_as_the_papers_equation_says(bias):
    changed, before = layer(bias), layer(bias)
    dead = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0]).bool()
    reinitialise(changed, dead, 0.1, 0.02, drawn())
    expected = before.gate.weight.detach().clone()
    expected[dead] = 0.9 * expected[dead] + 0.1 * 0.02 * torch.randn(3, 5, generator=drawn())
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
    reinitialise(plain, torch.zeros(8, dtype=torch.bool), 0.5, 0.02, drawn())
    assert torch.equal(gated.up.weight, before)
    reinitialise(plain, torch.arange(8) == 3, 0.5, 0.02, drawn())
    assert (gated.up.weight != before).any(1).tolist() == [False] * 3 + [True] + [False] * 4


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
        for changed in (whole, sharded):
            reinitialise(changed, dead, 0.1, 0.02, drawn())
        torch.testing.assert_close(sharded.gate.weight.full_tensor(), whole.gate.weight)
        torch.testing.assert_close(sharded.gate.bias.full_tensor(), whole.gate.bias)
    finally:
        dist.destroy_process_group()
