"""Plans on a GPU: what they are measured with, and that they take what is fastest."""

import time

import pytest
import torch

import twell_lab as tl
from twell_lab.analysis import costs, planner
from twell_lab.analysis.profile import profile
from twell_lab.layers.choice import Choice
from twell_lab.ops import clock

pytestmark = pytest.mark.gpu


def test_rates_are_those_of_a_gpu():
    rates = costs.measure_rates("cuda")
    assert rates.device == torch.cuda.get_device_name() and rates.dtype == "bfloat16"
    assert 1e11 < rates.bandwidth < 2e13 and rates.bandwidth / 3 < rates.l2 < 1e14
    assert 1e12 < rates.matmul < 1e16 and 1e-7 < rates.launch < 1e-4 and rates.cache > 1e6


@pytest.mark.parametrize("calls", ["eager", "compiled", "captured"])
def test_a_plan_takes_what_is_fastest_for_the_way_of_calling(calls):
    layer, inputs = clock.workload(2048, 1024, 4096, 20, "lognormal", torch.bfloat16, "cuda")
    plan = tl.plan(profile(layer, inputs[:1]), layer, tokens=(1, 2048), batches=inputs[1:2], calls=calls)
    assert plan.inputs == "captured from the batches" and plan.calls == calls
    for tokens in (1, 2048):
        timed = {row.choice: row for row in plan.layers[0].candidates if row.tokens == tokens}
        (chosen,) = (row for row in timed.values() if row.chosen)
        assert chosen.measured_us <= timed[Choice("dense")].measured_us, str(plan)
    torch._dynamo.reset()


class Normed(torch.nn.Module):
    """A drawn gated layer behind a norm, whose first value is the constant that the layer's thresholds go by."""

    def __init__(self, d_model, d_ff, nnz, seed):
        super().__init__()
        rates = clock.firing_rates(d_ff, nnz, seed=seed)
        drawn = clock.drawn(rates, 1, d_model, torch.bfloat16, "cuda", shrink=max(nnz, 1) ** 0.5, seed=seed)
        self.mlp = drawn[0]

    def forward(self, x):
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
        normed[..., 0] = x.shape[-1] ** 0.5
        return x + self.mlp(normed)


def test_a_model_is_planned_by_a_few_trials(monkeypatch):
    """38 layers of 2048 x 5632, mean nnz from 2 to 109: in ten seconds, as many timed as it has densities, not layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Normed(2048, 5632, 2 * (109 / 2) ** (i / 37), i) for i in range(38)))
    inputs = torch.randn(3, 4096, 2048, device="cuda", dtype=torch.bfloat16)
    ran, run = set(), planner.Trial.run
    monkeypatch.setattr(planner.Trial, "run", lambda trial, *given: ran.add(trial.layer.name) or run(trial, *given))
    firing = profile(model, [inputs[0]])
    tl.plan(firing, model, batches=[inputs[1]])  # kernels compiled, rates known to be there
    torch.cuda.synchronize()
    start = time.perf_counter()
    plan = tl.plan(firing, model, batches=[inputs[1], inputs[2]])
    seconds = time.perf_counter() - start
    print(f"{seconds:.2f} s, {len(ran)} layers timed\n{plan}")
    assert len(ran) <= 12 and seconds <= 10, (seconds, ran)
    for layer in plan.layers:
        for row in layer.candidates:
            if row.chosen and row.path != "dense":
                assert row.measured_us < row.dense_us, row
