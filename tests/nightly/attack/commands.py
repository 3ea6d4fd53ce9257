"""Every subcommand but the tour with hostile arguments, files and outputs: it does what it says, or ends with one line and exit
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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from tests.nightly.attack import harness, kills
from twell_lab.app import cli, recordings

# Written beside each other: words without a space, then those that need quotes.
NUMBERS = (
    *"0 -1 1 2 3 7 1.5 -0.0 1e-320 1e400 nan inf -inf x None 0x10 1_000 ٣ ² 1e5 -- - %s".split(),
    *("", " ", "\n", "\udcff", "9" * 19, "9" * 30, str(2**31), str(2**63), str(2**64), "1" + "0" * 5000),
)
WORDS = (
    *"x cpu cuda cuda:99 meta mps cpu:-1 bfloat16 float64 int8 relu relu2 silu bytes bpe: bpe:0 bpe:300".split(),
    *"bpe:99999999999 bpe:-1 ddp fsdp off auto lognormal é .. list 60M hf: hf:nobody/nothing?bytes=x".split(),
    *("hf:a/b?bytes=nan", "", " ", "\udcff", "a\nb", "x" * 300, "x" * 5000, "%d", "{}", "'", "\t"),
)

# Not for root: a faulty writer could then put a file in the place of a device, which the machine needs.
DEVICES = ("/dev/null", "/dev/full") if os.geteuid() else ()

SMALL = (
    "--steps 2 --batch 2 --context 8 --d-model 8 --heads 1 --layers 1 --d-ff 16 --device cpu --eval-windows 2 "
    "--eval-every 2"
).split()


@cache
def _home() -> Path:
    """Files of every unpleasant kind, and a model that was trained."""
    home = harness.home()
    (home / "empty").write_bytes(b"")
    (home / "binary").write_bytes(bytes(range(256)) * 40)
    (home / "nulls").write_bytes(bytes(4000))
    assert kills.text() == home / "text.txt"
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

    sizes = {"steps": 2, "batch": 2, "context": 8, "d_model": 8, "heads": 1, "layers": 1, "d_ff": 16}
    config = TrainConfig(**sizes, device="cpu", text=str(home / "text.txt"), eval_windows=2)
    train(config, out=home / "model", progress=False)
    shutil.copytree(home / "model", home / "half-a-model")
    (home / "half-a-model" / "model.safetensors").write_bytes(b"half")
    return home


def _paths(r: Random) -> str:
    home = _home()
    here = [str(home / os.fsdecode(name)) for name in sorted(os.listdir(os.fsencode(home)))]
    others = ("", ".", "/", *DEVICES, "/proc/self/mem", "/proc/self/nope", "x" * 300, "~", "-")
    return r.choice((*here, *here, str(home / "nowhere"), str(home / "text.txt" / "under"), *others))


def _new(r: Random) -> str:
    """A place to write to."""
    home, fresh = _home(), tempfile.mkdtemp(dir=_home() / "hollow")
    inside = [f"{fresh}/{name}" for name in ("a/b", "x" * 300, "\udcff")]
    taken = [str(home / name) for name in ("text.txt", "text.txt/x", "dangling", "loop", "model")]
    return r.choice((fresh, fresh, *inside, *taken, *DEVICES[1:], "/dev/null/x", "/proc/x", ""))


def _number(r: Random) -> str:
    return r.choice(NUMBERS)


def _word(r: Random) -> str:
    return r.choice(WORDS)


def _without(draw: Callable[[Random], str], refused: Callable[[str], bool]) -> Callable[[Random], str]:
    def drawn(r: Random) -> str:
        while refused(value := draw(r)):
            pass
        return value

    return drawn


_files = _without(_paths, lambda path: path.endswith(("/pipe", "/dev/full", "/mem", "-")))  # JSON is read as a whole
_few = _without(_number, lambda number: number.isdecimal() and len(number) > 1)  # steps or tokens that take no time
_soon = _without(_number, ("1_000", "7", "3").__contains__)  # seconds


def _may(numbers: str = "", words: str = "", **others) -> dict:
    """What an option may get: each named in `numbers` or `words`, and others by the function given."""
    named = {f"--{name}": _number for name in numbers.split()} | {f"--{name}": _word for name in words.split()}
    return named | {f"--{name.replace('_', '-')}" if name != "first" else "": value for name, value in others.items()}


def _given(command: str) -> tuple[list[str], dict]:
    """What makes a command quick and valid, and its options with what may be put in them."""
    home = _home()
    model, words, hollow = str(home / "model"), str(home / "text.txt"), home / "hollow"
    read = f"{model} --text {words} --windows 2"
    plan = f"{read} --tokens 1 --device cpu --predict-only"
    planning = _may("windows tokens", "device dtype", first=_paths, text=_paths)
    small = "--tokens 2 --d-model 8 --d-ff 16 --nnz 2 --seconds 0.01 --device cpu"
    model_rows = f"{model} --text {words} --tokens 4 --batches 1 --seconds 0.01 --device cpu"
    train = (
        "d-model layers heads d-ff l1 l1-delay l1-warmup dead-window reinit dead-every batch context "
        "accumulate lr warmup weight-decay clip seed log-every eval-every eval-windows"
    )
    usual, options = {
        "doctor": ("", {}),
        "train": (
            " ".join([*SMALL, "--text", words]),
            _may(train, "activation tokenizer device dtype kernels parallel config", text=_paths, out=_new)
            | _may(resume=_paths, steps=_few),
        ),
        "prepare": (f"{words} --out {hollow}/fresh", _may("", "tokenizer", first=_paths, out=_new)),
        "profile": (read, _may("windows", first=_paths, text=_paths, out=_new, against=_files)),
        "sparsify": (f"{plan} --out {hollow}/swapped", planning | _may(out=_new)),
        "sample": (
            f"{model} --tokens 4 --device cpu",
            _may("temperature top-k seed", "prompt device", first=_paths, tokens=_few),
        ),
        "bench": (small, _may("tokens d-model d-ff nnz", "dtype device", seconds=_soon, out=_new)),
        "bench model": (
            model_rows,
            _may("", "dtype device", first=_paths, text=_paths, plan=_files)
            | _may(tokens=_few, batches=_few, seconds=_soon, out=_new),
        ),
        "predict": (
            "T4 --tokens 2 --d-model 8 --d-ff 300 --nnz 2",
            _may("tokens d-model d-ff nnz", first=lambda r: r.choice((_word(r), "list", "H100 SXM"))),
        ),
        "course": (f"{hollow}/course", _may(first=_new)),
        "submit": (words, _may(first=_paths, out=_new)),
        "grade": (str(home), _may(first=_paths)),
        "record": ("", _may(first=_word, out=_new)),
        "records": (f"--folder {home}/records", _may(folder=_files)),
    }[command]
    return usual.split(), options


# The more often a command stands here, the more often it is drawn.
COMMANDS = (
    *("doctor", *["train"] * 4, *["prepare"] * 2, *["profile"] * 2, *["sparsify"] * 2, "sample", *["bench"] * 2),
    *("bench model", "predict", "course", "submit", "grade", "record", "records"),
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
        least = {"train": len(SMALL), "bench": len(usual), "bench model": len(usual)}.get(command, 0)
        line = line[: r.randint(least, len(line))]  # the usual sizes take long
    if r.random() < 0.04:
        line.insert(r.randint(0, len(line)), r.choice(("--nothing", "--help", "-h", "--", "--out=", "--json=1", "x")))
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
    shown = f"twell-lab {' '.join(map(ascii, line))} (output {way})"
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
            raise AssertionError(f"{shown}: {type(error).__name__}: {error}") from error
        finally:
            with contextlib.suppress(OSError, ValueError):
                out.close() if way in ("full", "closed") else None
    err.flush()
    said = err.buffer.getvalue().decode("utf-8", "replace")
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
