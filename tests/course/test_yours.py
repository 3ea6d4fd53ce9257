"""What later notebooks get of a reader: the own model and kernels where they are there, else a stand-in, and which."""

import pytest
import torch

from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.course import exercises, yours
from twell_lab.course.capstone import cases
from twell_lab.course.capstone import data as capstone
from twell_lab.models.tiny import LanguageModel, ModelConfig

needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_model_is_the_saved_one_or_a_stand_in():
    stand_in, said = yours.model()
    stands_in = "the model small stands in: d_model 128, d_ff 512, layers 4."
    assert said == f"Notebook 04 has saved no model of yours here; {stands_in}"
    own = LanguageModel(ModelConfig(d_model=32, layers=1, heads=2, d_ff=64, context=16))
    own.save(yours.MODEL)
    back, said = yours.model()
    assert said == "Your model, from notebook 04: d_model 32, d_ff 64, layers 1."
    assert not back.training and not stand_in.training
    ids = torch.arange(8)[None]
    assert torch.equal(back(ids), own(ids))


@needs_a_compiler
@pytest.mark.parametrize("name", ["pack_words", "down", "tile_counts"])
def test_a_kernel_is_the_own_one_once_it_is_right(name, capsys):
    answer, said = yours.kernel(name)
    assert "stands in" in said
    exercises.check(name, str(answer))
    assert capsys.readouterr().out.startswith(exercises.RIGHT)
    own = yours.FOLDER / f"{name}.cu"
    own.write_text("not a kernel")
    assert yours.kernel(name) == (answer, said)
    own.write_text(answer.read_text())
    assert yours.kernel(name) == (own, f"Your kernel {name}.")


@needs_a_compiler
def test_a_kernel_is_launched_in_the_simulator_and_counted():
    file, _ = yours.kernel("down")
    of, counted = cases.counted(), []
    for launch in (capstone.launcher(file, "cpu"), capstone.launcher(file, "cpu", counted)):
        y = of.y()
        assert launch(of.packed, of.gate, of.down_t, y) is y and cases.wrong(of, y) is None
    assert [counts.global_reads.sectors for counts in counted] == [capstone.judge(file).sectors]
    with pytest.raises(InputError, match="cannot be read"):
        capstone.launcher("missing.cu", "cpu")
