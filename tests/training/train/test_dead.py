"""Dead neurons: the paper's change to the rows of those that died. test_options.py has who counts as dead."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from twell_lab.layers.find import FeedForward
from twell_lab.training.objective import reinitialise

DEAD = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0]).bool()


def layer(bias=False, gated=True):
    gate, up, down = nn.Linear(5, 8, bias), nn.Linear(5, 8, bias), nn.Linear(8, 5, bias)
    return FeedForward("", nn.Module(), gate if gated else None, up, down)


def drawn():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_dead_rows_move_as_the_papers_equation_says(bias, gated):
    changed = layer(bias, gated)
    before = copy.deepcopy(changed)
    reinitialise(changed, torch.zeros(8, dtype=torch.bool), 0.1, drawn())
    assert torch.equal(changed.pattern.weight, before.pattern.weight)
    reinitialise(changed, DEAD, 0.1, drawn())
    expected = before.pattern.weight.detach().clone()
    expected[DEAD] = 0.9 * expected[DEAD] + 0.1 * 0.02 * torch.randn(3, 5, generator=drawn())
    torch.testing.assert_close(changed.pattern.weight.detach(), expected)
    assert torch.equal(changed.down.weight, before.down.weight)
    assert torch.equal(changed.up.weight, before.up.weight) == gated
    if bias:
        torch.testing.assert_close(changed.pattern.bias, torch.where(DEAD, 0.9, 1.0) * before.pattern.bias)


def test_a_sharded_weight_changes_as_a_whole_one_does():
    """One process is enough to see that the rows land where they belong; tests of the trainer use two."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        pytest.skip("a process group is open already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = layer(True)
        sharded, mesh = copy.deepcopy(whole), init_device_mesh("cpu", (1,))
        for name, value in list(sharded.gate.named_parameters()):
            setattr(sharded.gate, name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))
        for changed in (whole, sharded):
            reinitialise(changed, DEAD, 0.1, drawn())
        torch.testing.assert_close(sharded.gate.weight.full_tensor(), whole.gate.weight)
        torch.testing.assert_close(sharded.gate.bias.full_tensor(), whole.gate.bias)
    finally:
        dist.destroy_process_group()
