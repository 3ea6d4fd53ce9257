"""Methods of the map: held against the dense layer. Their times are tested with the course's map."""

import math

import pytest
import torch

from twell_lab.bench import methods
from twell_lab.ops import clock


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_stripes_give_the_dense_result(tokens, share):
    layer, (x, *_) = clock.workload(tokens, 24, 40, share * 40, "uniform", torch.float32, "cpu")
    with torch.no_grad():
        y = methods.by_stripes(layer, layer.down_proj.weight.t().contiguous(), x)
        torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)


def test_a_result_is_held_against_the_dense_one():
    methods.hold("nothing", torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(clock.WrongResult):
        methods.hold("no number", torch.full((2, 3), math.nan), torch.ones(2, 3))
