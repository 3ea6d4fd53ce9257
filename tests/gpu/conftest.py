import pytest
import torch


@pytest.fixture
def poisoned():
    """What torch allocates is filled with NaN, or the largest integer, so that what is not written is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
