"""Every subcommand with hostile arguments, files and outputs: it does what it says, or ends with one line and exit
status 1 or 2. Runs in processes of its own (harness.isolated)."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

from tests.nightly.attack import kills
from tests.nightly.attack.harness import PLACE
from twell_lab.app import cli, recordings

NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1.5",
    "-0.0",
    "1e-320",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "",
    " ",
    "x",
    "None",
    "0x10",
    "1_000",
    "٣",
    "²",
    "9" * 19,
    "9" * 30,
    str(2**31),
    str(2**63),
    str(2**64),
    "1" + "0" * 5000,
    "1e5",
    "--",
    "-",
    "%s",
    "\n",
    "\udcff",
)
WORDS = (
    "",
    " ",
    "x",
    "cpu",
    "cuda",
    "cuda:99",
    "meta",
    "mps",
    "cpu:-1",
    "bfloat16",
    "float64",
    "int8",
    "relu",
    "relu2",
    "silu",
    "bytes",
    "bpe:",
    "bpe:0",
    "bpe:300",
    "bpe:99999999999",
    "bpe:-1",
    "ddp",
    "fsdp",
    "off",
    "auto",
    "lognormal",
    "é",
    "\udcff",
    "a\nb",
    "..",
    "list",
    "60M",
    "hf:",
    "hf:nobody/nothing?bytes=x",
    "hf:a/b?bytes=nan",
    "x" * 300,
    "x" * 5000,
    "%d",
    "{}",
    "'",
    "\t",
)

# Not for root: a faulty writer could then put a file in the place of a device, which the machine needs.
DEVICES = ("/dev/null", "/dev/full") if os.geteuid() else ()

SMALL = (
    "--steps",
    "2",
    "--batch",
    "2",
    "--context",
    "8",
    "--d-model",
    "8",
    "--heads",
    "1",
    "--layers",
    "1",
    "--d-ff",
    "16",
    "--device",
    "cpu",
    "--eval-windows",
    "2",
    "--eval-every",
    "2",
)


@cache
def _home() -> Path:
    """Files of every unpleasant kind, and a model that was trained."""
    home = Path(tempfile.mkdtemp(dir=os.environ.get(PLACE)))
    (home / "empty").write_bytes(b"")
    (home / "binary").write_bytes(bytes(range(256)) * 40)
    (home / "nulls").write_bytes(bytes(4000))
    (home / "text.txt").write_bytes(kills._text().read_bytes())
    (home / "short.txt").write_text("short")
    (home / "no-utf8.txt").write_bytes(b"\xff\xfe broken \x80 text\n" * 300)
    (home / "deep.json").write_text("[" * 20000)
    (home / "bad.json").write_text('{"format": NaN, "rows": [1e999], "schema": ' + "9" * 5000 + "}")
    (home / "list.json").write_text("[1, 2]")
    (home / "folder").mkdir()
    (home / "folder" / "a.txt").write_text("a text in a folder\n" * 200)
    (home / "hollow").mkdir()
    (home / "loop").symlink_to(home / "loop")
    (home / "dangling").symlink_to(home / "nowhere")
    os.mkfifo(home / "pipe")
    os.makedirs(os.fsencode(home) + b"/name-\xff", exist_ok=True)
    (home / "records").mkdir()
    (home / "records" / "broken.json").write_text("{")
    from twell_lab.training.config import TrainConfig
    from twell_lab.training.loop import train

    config = TrainConfig(
        steps=2,
        batch=2,
        context=8,
        d_model=8,
        heads=1,
        layers=1,
        d_ff=16,
        device="cpu",
        text=str(home / "text.txt"),
        eval_windows=2,
    )
    train(config, out=home / "model", progress=False)
    shutil.copytree(home / "model", home / "half-a-model")
    (home / "half-a-model" / "model.safetensors").write_bytes(b"half")
    return home


def _paths(r: Random) -> str:
    home = _home()
    found = sorted(os.fsdecode(each) for each in os.listdir(os.fsencode(home)))
    return r.choice(
        (
            *(str(home / name) for name in found),
            *(str(home / name) for name in found),
            str(home / "nowhere"),
            "",
            ".",
            "/",
            *DEVICES,
            "/proc/self/mem",
            "/proc/self/nope",
            "x" * 300,
            str(home / "text.txt" / "under"),
            "~",
            "-",
        )
    )


def _files(r: Random) -> str:
    """As `_paths`, without files that never end: JSON is read as a whole, from a pipe too."""
    while (path := _paths(r)).endswith(("/pipe", "/dev/full", "/mem", "-")):
        pass
    return path


def _new(r: Random) -> str:
    """A place to write to."""
    fresh = tempfile.mkdtemp(dir=_home() / "hollow")
    return r.choice(
        (
            fresh,
            fresh,
            fresh + "/a/b",
            str(_home() / "text.txt"),
            str(_home() / "text.txt" / "x"),
            *DEVICES[1:],
            "/dev/null/x",
            "/proc/x",
            "",
            str(_home() / "dangling"),
            str(_home() / "loop"),
            fresh + "/" + "x" * 300,
            fresh + "/\udcff",
            str(_home() / "model"),
        )
    )


def _number(r: Random) -> str:
    return r.choice(NUMBERS)


def _few(r: Random) -> str:
    """A number of steps or tokens that is refused, or so small that they take no time."""
    while (number := _number(r)).isdecimal() and len(number) > 1:
        pass
    return number


def _soon(r: Random) -> str:
    """A number of seconds that is refused, or small."""
    while (number := _number(r)) in ("1_000", "7", "3"):
        pass
    return number


def _word(r: Random) -> str:
    return r.choice(WORDS)


# For each command: what makes it quick and valid, and its options with what may be put in them.
_TRAIN = {
    **dict.fromkeys(
        (
            "--d-model",
            "--layers",
            "--heads",
            "--d-ff",
            "--l1",
            "--l1-delay",
            "--l1-warmup",
            "--dead-window",
            "--reinit",
            "--reinit-sigma",
            "--dead-every",
            "--steps",
            "--batch",
            "--context",
            "--accumulate",
            "--lr",
            "--warmup",
            "--weight-decay",
            "--clip",
            "--seed",
            "--log-every",
            "--eval-every",
            "--eval-windows",
            "--checkpoint-every",
        ),
        _number,
    ),
    **dict.fromkeys(
        ("--activation", "--tokenizer", "--device", "--dtype", "--kernels", "--parallel", "--config"), _word
    ),
    "--text": _paths,
    "--out": _new,
    "--resume": _paths,
    "--steps": _few,
}


def _given(command: str) -> tuple[list[str], dict]:
    home = _home()
    model, words = str(home / "model"), str(home / "text.txt")
    planning = dict.fromkeys(("", "--text"), _paths) | dict.fromkeys(("--windows", "--tokens"), _number)
    planning |= dict.fromkeys(("--device", "--dtype"), _word)
    return {
        "doctor": ([], {}),
        "tour": (["--render", str(home / "list.json")], {"--render": _files, "--text": _paths, "--out": _new}),
        "train": ([*SMALL, "--text", words], _TRAIN),
        "prepare": (
            [words, "--out", str(home / "hollow" / "fresh")],
            {"": _paths, "--out": _new, "--tokenizer": _word},
        ),
        "profile": (
            [model, "--text", words, "--windows", "2"],
            {"": _paths, "--text": _paths, "--windows": _number, "--out": _new, "--against": _files},
        ),
        "plan": (
            [model, "--text", words, "--windows", "2", "--tokens", "1", "--device", "cpu", "--predict-only"],
            planning | {"--out": _new},
        ),
        "sparsify": (
            [model, "--out", str(home / "hollow" / "swapped"), "--text", words, "--windows", "2", "--tokens", "1"]
            + ["--device", "cpu", "--predict-only"],
            planning | {"--plan": _files, "--out": _new},
        ),
        "thresholds": (
            [model, "--text", words, "--windows", "2"],
            {
                "": _paths,
                "--text": _paths,
                "--windows": _number,
                "--sparsity": _number,
                "--method": _word,
                "--out": _new,
            },
        ),
        "sample": (
            [model, "--tokens", "4", "--device", "cpu"],
            {
                "": _paths,
                "--prompt": _word,
                "--tokens": _few,
                "--temperature": _number,
                "--top-k": _number,
                "--seed": _number,
                "--device": _word,
            },
        ),
        "export": ([model, "--out", str(home / "hollow" / "llama")], {"": _paths, "--out": _new}),
        "bench": (
            ["--tokens", "2", "--d-model", "8", "--d-ff", "16", "--nnz", "2", "--seconds", "0.01", "--device", "cpu"],
            {
                "--tokens": _number,
                "--d-model": _number,
                "--d-ff": _number,
                "--nnz": _number,
                "--dtype": _word,
                "--device": _word,
                "--workload": _word,
                "--seconds": _soon,
                "--out": _new,
            },
        ),
        "bench model": (
            [model, "--text", words, "--tokens", "4", "--batches", "1", "--seconds", "0.01", "--device", "cpu"],
            {
                "": _paths,
                "--text": _paths,
                "--plan": _files,
                "--firing": _files,
                "--tokens": _few,
                "--batches": _few,
                "--dtype": _word,
                "--device": _word,
                "--seconds": _soon,
                "--out": _new,
            },
        ),
        "predict": (
            ["T4", "--tokens", "2", "--d-model", "8", "--d-ff", "300", "--nnz", "2"],
            {
                "": lambda r: r.choice((_word(r), "list", "H100 SXM")),
                "--tokens": _number,
                "--d-model": _number,
                "--d-ff": _number,
                "--nnz": _number,
                "--workload": _word,
            },
        ),
        "course": ([str(home / "hollow" / "course")], {"": _new}),
        "submit": ([words], {"": _paths, "--out": _new}),
        "record": ([], {"": _word, "--out": _new}),
        "records": (["--folder", str(home / "records")], {"--folder": _files}),
        "compile": (
            [str(home / "hollow" / "cubins"), "--arch", "x"],
            {"": _new, "--arch": _word, "--dtype": _word, "--d-model": _number},
        ),
    }[command]


COMMANDS = (
    "doctor",
    "tour",
    "train",
    "train",
    "train",
    "train",
    "prepare",
    "prepare",
    "profile",
    "profile",
    "plan",
    "sparsify",
    "thresholds",
    "sample",
    "export",
    "bench",
    "bench",
    "bench model",
    "predict",
    "course",
    "submit",
    "record",
    "records",
    "compile",
)


def arguments(r: Random) -> list[str]:
    """A command line that starts out valid and has some of its values replaced, options added, left out or made up."""
    command = r.choice(COMMANDS)
    usual, options = _given(command)
    line = list(usual)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        if not options:
            break
        option = r.choice(tuple(options))
        value = options[option](r) if r.random() < 0.85 else r.choice((_number, _word, _files))(r)
        if option == "":
            line = [value, *line[1:]] if line and not line[0].startswith("-") else [value, *line]
        elif option in line and line.index(option) + 1 < len(line):
            line[line.index(option) + 1] = value
        else:
            line += [option, value]
    if r.random() < 0.2:
        line.append("--json")
    if r.random() < 0.05:
        line = line[
            : r.randint(
                {"train": len(SMALL), "bench": len(usual), "bench model": len(usual)}.get(command, 0), len(line)
            )
        ]  # the usual sizes take long
    if r.random() < 0.04:
        line.insert(r.randint(0, len(line)), r.choice(("--nothing", "--help", "-h", "--", "--out=", "--json=1", "x")))
    if command == "tour" and not any(each.startswith("--render") for each in line):
        line += ["--render", str(_home() / "list.json")]  # a tour takes too long
    if command == "course":
        line = [each for each in line if each != "--"] + ["--no-open"]
    if command == "record" and any(each in recordings.RECORDINGS for each in line):
        return ["record", "--json"]  # and so does a recording
    return [command, *line]


def _output(r: Random) -> tuple[io.TextIOBase, str]:
    """Where a command writes to, and what it is: a stream of some encoding, a full disk, or a pipe that nobody reads."""
    way = r.choices(("utf-8", "ascii", "full", "closed"), (80, 10, 6, 4))[0]
    if way == "full":
        return open("/dev/full", "w"), way  # noqa: SIM115
    if way == "closed":
        read, write = os.pipe()
        os.close(read)
        return os.fdopen(write, "w"), way
    return io.TextIOWrapper(io.BytesIO(), encoding=way), way


def check(r: Random, counts: Counter) -> None:
    """One command line."""
    line = arguments(r)
    out, way = _output(r)
    err = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if way == "ascii" else "utf-8", errors="backslashreplace")
    counts.update([line[0], f"output {way}"])
    counts["checked"] += 1
    within = contextlib.chdir(_home() / "hollow")  # where a name without a folder may be written to
    with within, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.argv = ["twell-lab", *line]
        try:
            status = cli.main(line)
        except SystemExit as stopped:  # argparse's
            status = stopped.code
        except BaseException as error:
            raise AssertionError(
                f"twell-lab {' '.join(map(ascii, line))} (output {way}): {type(error).__name__}: {error}"
            ) from error
        finally:
            with contextlib.suppress(OSError, ValueError):
                out.close() if way in ("full", "closed") else None
    err.flush()
    said = err.buffer.getvalue().decode("utf-8", "replace")
    shown = f"twell-lab {' '.join(map(ascii, line))} (output {way})"
    assert status in (0, 1, 2), f"{shown}: exit status {status}"
    assert "Traceback" not in said, f"{shown}: {said[-2000:]}"
    assert status == 0 or said.strip() or way in ("full", "closed") or status == 1, (
        f"{shown}: exit status {status} without a word"
    )
    last = said.strip().splitlines()[-1] if said.strip() else ""
    assert status != 2 or last.startswith(("twell-lab", "usage:")) or "error:" in said or way != "utf-8", (
        f"{shown}: it says {said[-300:]!r}"
    )
    counts[f"exit status {status}"] += 1
