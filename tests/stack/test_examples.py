"""The examples of the README and of docs/library.md run, and the commands that they name exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import twell_lab as tl
from tests.models.speaking import decoders
from twell_lab.analysis import planner
from twell_lab.app import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIBRARY = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)```", LIBRARY, re.S | re.M)
SHORT = {
    r"\bsteps=\d+": "steps=3, eval_windows=8",
    "max_new_tokens=[0-9]+": "max_new_tokens=5",
    "d_model=2048, d_ff=5632": "d_model=64, d_ff=256",
    r"tokens=\[512\]": "tokens=[8], seconds=0.05",
    r"max_steps=\d+": "max_steps=2, use_cpu=True, report_to=[]",
}
TWELL = tl.Choice("twell")
NUMBER = re.compile(r"\d[\d,.]*")


def test_the_readme_says_what_its_example_prints(capsys, monkeypatch):
    """Word by word, and number by number within a hundredth; but for times, for which those of the README are taken."""
    ((example, shown),) = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.S)
    (ours, dense), *_ = re.findall(r"twell +([\d,]+) +([\d,]+) ", shown)
    times = [1e-3 * float(number.replace(",", "")) for number in (dense, ours)]
    monkeypatch.setattr(
        planner.clock, "time_calls", lambda calls, *_, **__: {way: [times[way == (TWELL, False)]] for way in calls}
    )
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert [line.split() for line in NUMBER.sub("#", printed).splitlines()] == [
        line.split() for line in NUMBER.sub("#", shown).splitlines()
    ]
    numbers = ([float(number.rstrip(".,").replace(",", "")) for number in NUMBER.findall(t)] for t in (printed, shown))
    assert next(numbers) == pytest.approx(next(numbers), rel=0.01)


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A small model of transformers with its tokenizer, and a text, under the names that docs/library.md has for them."""
    for family, name in (("OPT", "my-model"), ("Llama", "silu")):
        model = decoders.build(family, vocab_size=256, max_position_embeddings=512)
        for part in (model, decoders.of_bytes()):
            part.save_pretrained(tmp_path / "build" / name)
    (tmp_path / "my-text.txt").write_text("a text of some thousand letters, line after line\n" * 300)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("task", "block"), BLOCKS, ids=[task for task, _ in BLOCKS])
def test_the_lines_of_a_task_run(own_model, task, block):
    """After those that load a model."""
    if "cupy" in block and not torch.cuda.is_available():
        pytest.skip("CuPy needs a GPU")
    if "lm_eval" in block:
        pytest.skip("it downloads a task; tests/nightly/test_lm_eval.py has one of its own")
    names = {}
    for lines in dict.fromkeys((BLOCKS[0][1], block)):
        for long, short in SHORT.items():
            lines = re.sub(long, short, lines)
        exec(compile(lines, f"library.md, {task}", "exec"), names)
    assert isinstance(names["model"], torch.nn.Module) and len(names["batches"]) > 1


def test_the_commands_for_a_model_of_ones_own_run(own_model, capsys):
    (lines,) = re.findall(r"```sh\n(twell-lab profile .*?)```", LIBRARY, re.S)
    short = {"profile": "--windows 2", "sparsify": "--windows 2 --tokens 1", "sample": "--tokens 5"}
    short |= {"bench": "--tokens 8 --batches 1 --seconds 0.05"}
    for line in lines.splitlines():
        _, *arguments = shlex.split(line)
        arguments += [*shlex.split(short[arguments[0]]), *(["--device", "cpu"] * ("profile" not in line))]
        assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "tokens a second" in shown and "bench: " in shown
