"""Sparse layers whose weights FSDP2 shards: two processes on the CPU train what one trains, and no copy of a weight
gets stale."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import twell_lab as tl
from twell_lab.layers import terms as penalty
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training.parallel import joined

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)
CONFIG = ModelConfig(vocabulary=32, d_model=16, layers=2, heads=2, d_ff=256, context=8)


def model(seed=0):
    """A model of which few neurons can fire: only then a sparse layer on a CPU reads its own copy of a weight."""
    torch.manual_seed(seed)
    net = LanguageModel(CONFIG)
    with torch.no_grad():
        for found in feed_forwards(net):
            found.gate.weight[6:] = 0
    return net


def tokens(step):
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))


def train_step(net, optimizer, batch):
    optimizer.zero_grad()
    with penalty.layer_terms(net) as terms:
        scores = net(batch)
    (scores.square().mean() + 0.01 * sum(term.l1 for term in terms)).backward()
    optimizer.step()


def alone():
    """The logits after each of three steps, and after the weights of another model were loaded, of a dense model in one
    process."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    seen = []
    for step in range(3):
        train_step(net, optimizer, tokens(step))
        seen.append(net(tokens(9)).detach())
    seen.append(model(5)(tokens(9)).detach())
    return seen


def work(rank, port, path, out):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with joined("cpu"):
        shard_and_train(rank, path, out)


def shard_and_train(rank, path, out):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    net = sparsify(model(), "twell")
    for found in feed_forwards(net):
        found.module.learn(path)
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    seen = []
    for step in range(3):
        train_step(net, optimizer, tokens(step).chunk(2)[rank])
        with torch.no_grad():
            seen.append(net(tokens(9)))
    for layer in (net, *net.layers):
        layer.reshard()
    own, other = dict(net.named_parameters()), model(5).state_dict()
    placed = {name: (own[name].device_mesh, own[name].placements) for name in other}
    net.load_state_dict({name: distribute_tensor(value, *placed[name]) for name, value in other.items()})
    with torch.no_grad():
        seen.append(net(tokens(9)))
    if rank == 0:
        torch.save(seen, out)
    dist.barrier()


@pytest.mark.parametrize("path", ["dense", "twell"])
def test_two_processes_train_what_one_trains(path, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes.start_processes(work, (port, path, tmp_path / "seen.pt"), nprocs=2, start_method="spawn")
    for step, (a, b) in enumerate(zip(torch.load(tmp_path / "seen.pt"), alone(), strict=True)):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3, msg=lambda m, step=step: f"{step}: {m}")


def test_layers_whose_weights_are_sharded_already_stay_dense():
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for parts in (lambda net: [net.layers[1]], lambda net: [net.layers[1].mlp]):
            net = model()
            for part in parts(net):
                fully_shard(part)
            sparsify(net, "twell")
            assert not isinstance(net.layers[1].mlp, SparseFFN)
            assert "not sharded" in tl.report(net).rows[1]["why"]
    finally:
        dist.destroy_process_group()
