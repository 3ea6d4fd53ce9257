"""What every sparse layer is compared by: the dense layer that it was made from, as that one is now."""

import torch


def assert_follows(sparse, dense, x):
    with torch.no_grad():
        expected = dense(x)
        largest = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(sparse(x), expected, rtol=1e-4, atol=1e-4 * largest)
