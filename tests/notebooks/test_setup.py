"""The first cell's helper, and the script that stores outputs."""

import importlib.util
import logging
from pathlib import Path

import plotly.io as pio
import pytest
import torch

from twell_lab.course import notebook as notebook_module

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"


@pytest.fixture(autouse=True)
def _same_renderer_afterwards(monkeypatch):
    before = pio.renderers.default
    monkeypatch.delenv(notebook_module.STORING, raising=False)
    monkeypatch.delenv("PLOTLY_RENDERER", raising=False)
    yield
    pio.renderers.default = before


def test_setup_names_the_machine_and_returns_the_device(capsys):
    device = notebook_module.setup(seed=3)
    assert device == ("cuda" if torch.cuda.is_available() else "cpu")
    line, runs = capsys.readouterr().out.splitlines()
    assert line.startswith("This machine: ") and f"torch {torch.__version__}" in line
    assert runs == notebook_module.what_runs()
    first = torch.rand(1)
    notebook_module.setup(seed=3)
    assert torch.equal(torch.rand(1), first)


@pytest.mark.parametrize(
    ("capability", "natively", "recorded"),
    [
        (None, "torch, on the CPU.", "what GPUs take."),
        ((7, 5), "torch and, on the T4, kernels for sm_75.", "kernels for sm_80, sm_90, and what other GPUs take."),
        ((9, 0), "torch and, on the T4, kernels for sm_75, sm_80, sm_90.", "other GPUs' times."),
        ((10, 0), "torch and, on the T4, kernels for sm_75, sm_80.", "kernels for sm_90, and what other GPUs take."),
        (
            (6, 0),
            "torch, no kernel (the GPU is too old).",
            "kernels for sm_75, sm_80, sm_90, and what other GPUs take.",
        ),
    ],
)
def test_what_runs_depends_on_the_gpu(monkeypatch, capability, natively, recorded):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    for name, said in {"gpu": "T4", "stack_fault": None, "cupy_packages": ["cupy-cuda12x"]}.items():
        monkeypatch.setattr(notebook_module.core, name, lambda said=said: said)
    said = notebook_module.what_runs()
    assert said.startswith(f"Natively: {natively} In the simulator: ") and said.endswith(f" Recorded: {recorded}")


def test_without_a_compiler_nothing_is_simulated(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "none"))
    assert "In the simulator: nothing, for want of a C++ compiler" in notebook_module.what_runs()


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_an_older_gpu_gets_the_16_bits_that_it_has(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert notebook_module.dtype_for("cuda") == notebook_module.sixteen_bits("cuda") == dtype
    assert notebook_module.dtype_for(torch.device("cuda", 0)) == dtype
    assert (notebook_module.dtype_for("cpu"), notebook_module.sixteen_bits("cpu")) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("before", "after"), [("plotly_mimetype+notebook", "plotly_mimetype"), ("colab", "colab"), ("vscode", "vscode")]
)
def test_a_host_keeps_its_renderer_and_no_script_is_written_into_a_notebook(before, after):
    pio.renderers.default = before
    assert notebook_module.use_renderer() == after == pio.renderers.default


def test_storing_adds_pictures(monkeypatch):
    monkeypatch.setenv(notebook_module.STORING, "1")
    assert notebook_module.use_renderer() == "plotly_mimetype+png"
    assert not logging.getLogger("choreographer.channels.pipe").isEnabledFor(logging.ERROR)


@pytest.fixture
def store():
    spec = importlib.util.spec_from_file_location("store", FOLDER / "store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored(*outputs, first="- **Stored figures:** not made yet"):
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

    setup = new_output("stream", name="stdout", text="This machine: a toaster; 2026-01-01\n")
    cells = [
        new_markdown_cell(first),
        new_code_cell("setup()", outputs=[setup]),
        new_code_cell("work()", outputs=[new_output(kind, **fields) for kind, fields in outputs]),
    ]
    return new_notebook(cells=cells, metadata={"widgets": {}, "kernelspec": {"name": "mine", "display_name": "Mine"}})


def test_storing_stamps_the_first_cell_and_says_where_a_widget_is(store):
    notebook = stored(
        ("stream", {"name": "stdout", "text": "a"}),
        ("stream", {"name": "stdout", "text": "b\n"}),
        ("display_data", {"data": {store.WIDGET: {"model_id": "1"}, "text/plain": "VBox()"}}),
        ("display_data", {"data": {FIGURE: {}, PICTURE: "", "text/plain": "Figure({...})"}}),
    )
    store.tidy(notebook)
    assert notebook.cells[0].source == "- **Stored figures:** a toaster; 2026-01-01"
    assert "widgets" not in notebook.metadata and notebook.metadata.kernelspec.name == "python3"
    text, widget, figure = notebook.cells[2].outputs
    assert text.text == "ab\n" and set(figure.data) == {FIGURE, PICTURE}
    assert widget.data == {"text/markdown": store.MOVES, "text/plain": store.MOVES.strip("*")} and not widget.metadata


def test_a_stored_figure_is_put_into_words(store):
    paper = {"xref": "paper", "yref": "paper"}
    figure = {
        "layout": {
            "title": {"text": "Bytes &lt; 10<sup>12</sup><br><sup>yours, now</sup>"},
            "xaxis": {"title": {"text": "format"}},
            "annotations": [{"text": "beside it", **paper}, {"text": "on a bar", "xref": "x"}],
        },
        "data": [
            {"name": "dense"},
            {"name": "CSR", "type": "bar", "x": ["read", "written"], "y": [0.12345, None]},
            {"name": "ELL", "type": "scatter", "x": [1, 2, 3], "y": [4, 5, 12345.6]},
            {"name": "COO", "type": "bar", "orientation": "h", "x": [7], "y": ["<b>held</b>"]},
            {"name": "dense"},
            {"type": "bar", "x": ["a", "b"], "y": [2, 3]},
            {},
        ],
    }
    notebook = stored(
        ("stream", {"name": "stdout", "text": "ab\n"}), ("display_data", {"data": {FIGURE: figure, PICTURE: ""}})
    )
    store.tidy(notebook)
    words = notebook.cells[2].outputs[1].metadata[PICTURE]["alt"]
    assert words == (
        "Bytes < 10^12; panels: beside it; drawn: dense, CSR 0.123 at read, ELL 4 at 1 to 12,346 at 3, COO 7 at held, 2 at a, 3 at b; "
        "axes: format; yours, now"
    )
    two = [{"text": text, **paper} for text in ("first", "second")]
    assert store.in_words(figure | {"layout": {"annotations": two}}).startswith("first, second; drawn")
    many = store.in_words({"data": [{"name": f"curve {i} of some length"} for i in range(100)]})
    assert many.startswith("drawn: curve 0") and many.endswith("of some length") and 370 < len(many) <= store.SAID


@pytest.mark.parametrize(
    "notebook",
    [
        stored(("display_data", {"data": {FIGURE: {}}})),
        stored(first="# No line to stamp"),
        stored(("stream", {"name": "stderr", "text": "Traceback, with this machine's paths"})),
    ],
)
def test_what_cannot_be_stored_is_refused(store, notebook):
    with pytest.raises(RuntimeError):
        store.tidy(notebook)
