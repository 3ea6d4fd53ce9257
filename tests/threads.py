"""A fixture for tests of tensors so small that a second thread gains nothing, and on a busy machine is waited for."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Let torch compute on one thread, in the module or the folder that imports this."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
