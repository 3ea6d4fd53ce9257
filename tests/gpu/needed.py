"""What tests of other sparsities need of a GPU and of torch. Nothing else skips one, so that what fails is seen."""

import pytest
import torch


def two_four(backend: str | None = None) -> None:
    """Skip where torch has no 2:4 products by this backend, None: by any."""
    major = torch.cuda.get_device_capability()[0]
    here = {"cutlass": major == 8, "cusparselt": torch.backends.cusparselt.is_available()}
    if major < 8:
        pytest.skip("2:4 products need compute capability 8.0")
    if not (any(here.values()) if backend is None else here[backend]):
        said = {
            "cutlass": "torch's CUTLASS has 2:4 products for GPUs of 8.x alone",
            "cusparselt": "this build of torch has no cuSPARSELt",
        }
        pytest.skip(said[backend or "cusparselt"])


def fp8() -> None:
    """Skip where the GPU has no FP8 products."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 products need compute capability 8.9")


def path(name: str) -> None:
    """Skip where a path of this name runs on no such GPU."""
    {"two_four": two_four, "fp8": fp8}.get(name, lambda: None)()
