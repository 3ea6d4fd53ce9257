"""A whole model on a GPU: graphs, compiled code, peak memory, the energy of a token, and a step of training."""

import pytest
import torch

import twell_lab as tl
from twell_lab.bench import drawn, energy, paths
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock

pytestmark = pytest.mark.gpu
SIZES = ModelConfig(vocabulary=1024, d_model=512, layers=3, heads=8, d_ff=2048, context=512)


def test_a_drawn_model_in_every_way():
    pytest.importorskip("transformers")
    record = tl.bench.model(SIZES, tokens=(512,), batches=(1, 8), graphs=True, training=True, seconds=0, progress=False)
    paths = ["dense eager", "planned", "planned for graphs"]
    replayed = [*paths, *(f"{path} (graph)" for path in paths)]
    forward, decode, training = (
        [row for row in record.rows if row["kind"] == kind]
        for kind in ("model_forward", "model_decode", "model_training")
    )
    assert [row["path"] for row in forward] == 2 * replayed and [row["path"] for row in decode] == 4 * replayed
    assert [row["path"] for row in training] == ["dense eager", "planned"]
    assert "left_out" not in record.notes and record.kernels
    for row in record.rows:
        graph = row["path"].endswith("(graph)")
        assert row["dtype"] == "bfloat16" and row["device"] == torch.cuda.get_device_name() and row["wall_ms"] > 0
        assert ("peak_bytes" in row) != graph and ("gpu_ms" in row) == (not graph and row["kind"] != "model_training")
        if row["kind"] != "model_training":
            assert row.get("error_over_allowed", 0) <= 1 and row["nnz"] == pytest.approx(10.5, rel=0.5)


def test_a_model_of_this_project_on_a_path_by_name():
    torch.manual_seed(0)
    model = LanguageModel(SIZES).cuda().bfloat16().eval()
    text = torch.randint(1024, (20_000,))
    record = tl.bench.model(model, tokens=(64,), batches=(8,), text=text, plan="twell", seconds=0, progress=False)
    assert {row["choice"] for row in record.rows if row["path"].startswith("forced twell")} == {"3 twell"}
    assert {row["path"] for row in record.rows} >= {"forced twell (graph)", "dense eager (graph)"}


def test_every_path_in_a_whole_model():
    """What `twell-lab record model-paths` does, at a small size."""
    pytest.importorskip("transformers")
    sizes = {"layers": 2, "d_model": 512, "d_ff": 1024, "heads": 8, "vocabulary": 256, "context": 256}
    shape = drawn.Shape(**sizes, sequences=80, cached=64, least=4.0, most=12.0, mean=8.0)
    left_out = {}
    found = {name: [row for step in steps for row in step()] for name, steps in paths.sections(shape, left_out).items()}
    assert not any("are off by" in why or "CUDA graphs" in what for what, why in left_out.items()), left_out
    for subject in paths.SUBJECTS:
        rows = found[subject.name]
        ways = {row["path"].removesuffix(" (graph)") for row in rows}
        refused = {each for each in subject.paths if f"{subject.name}, {each}" in left_out}
        assert refused <= {"fp8", "two_four"}  # where this GPU or this torch has none
        assert ways == {"dense eager", *(paths.called(each) for each in subject.paths if each not in refused)}, left_out
        assert {row["path"].endswith(" (graph)") for row in rows if row["tokens"] < 2**14} == {True, False}
        for row in rows:
            assert row["dtype"] == "bfloat16" and 0 < row["error"] < 1
            assert ("loss" in row) == (subject.trained and row["kind"] == "model_forward")


def test_the_energy_of_calls_is_read():
    read, why = energy.meter(torch.device("cuda"))
    if read is None:
        pytest.skip(why)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    samples = energy.millijoules(read, {"square": lambda turn: x @ x}, torch.cuda.synchronize, samples=3)["square"]
    median, spread = clock.quartiles(samples)
    # 137 GFLOP: no GPU takes less than 0.1 pJ, or more than 100, for each.
    assert len(samples) == 3 and 10 < median < 1e4 and spread < 0.3 * median
