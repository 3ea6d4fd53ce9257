"""What every sparse layer is compared by: the dense layer that it was made from, as that one is now; also in threads."""

import threading

import torch
from torch import nn


def assert_follows(sparse, dense, x):
    with torch.no_grad():
        expected = dense(x)
        largest = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(sparse(x), expected, rtol=1e-4, atol=1e-4 * largest)


def assert_threads_agree(sparse, x, expected):
    """Six threads at once call the layer, twenty times each."""
    errors, barrier = [], threading.Barrier(6)

    def work():
        try:
            barrier.wait()
            for _ in range(20):
                torch.testing.assert_close(sparse(x), expected, rtol=1e-4, atol=1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ---- what may happen to the weight of a projection


def replace(part):
    part.weight = nn.Parameter(torch.randn_like(part.weight), requires_grad=False)


def write(part):
    part.weight.mul_(2)


def other_data(part):
    part.weight.data = torch.randn_like(part.weight)
