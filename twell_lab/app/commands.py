"""The commands that need no saved model. Each imports what it needs when it runs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import twell_lab as tl

from .. import core, records
from ..core import InputError, RecordError, StackError, check_folder
from .terminal import Answer


def tour(
    *,
    text: Annotated[str | None, "a file or folder to train on [the source of Python's standard library]"] = None,
    out: Annotated[Path, "where index.html and tour.json go"] = Path("build/tour"),
    quick: Annotated[bool, "a few steps and small layers, to see that all works; its figures say nothing"] = False,
) -> Answer:
    """Train with and without L1, profile, pack, time, and write a page."""
    from . import tour

    check_folder(out)
    record = tour.run(text, out, quick)
    seconds = sum(record.notes["tour"]["seconds"].values())
    done = f"tour: done in {seconds:.0f} s; the page is {out / 'index.html'}"
    return Answer(record.to_json(), f"{tour.summary(record)}\n{done}")


def train(
    *,
    out: Annotated[Path | None, "a new folder, for metrics, checkpoints for --resume, and the trained model"] = None,
    resume: Annotated[Path | None, "go on with the run there; --steps, where and how it computes may change"] = None,
    config: Annotated[
        str | None, "what to start from: 1M 5M 20M 60M 150M 0.5B 1B 1.5B 2B, or a YAML or JSON file"
    ] = None,
    **fields: Any,
) -> Answer | None:
    """Train a small ReLU language model, with an L1 penalty if asked for.

    examples:

      twell-lab train --text my-texts --l1 1e-3 --out build/mine
      twell-lab train --resume build/mine
      torchrun --nproc-per-node 2 -m twell_lab train --config 0.5B \\
        --text texts/edu --dtype bfloat16 --compile --out build/edu

    Ctrl-C, SIGTERM and every five minutes save the run; about a tenth of the text
    is held out for validation; metrics.jsonl in --out has a line for every
    --log-every steps. On a GPU, --dtype bfloat16 --compile is several times faster."""
    from ..training import checkpoint
    from ..training.config import of

    asked = {**(of(config) if config is not None else {}), **fields}
    if asked.get("activation") == "relu2" and resume is None and "from_" not in asked:
        asked.setdefault("gated", False)  # sparse layers compute the square in plain layers alone
    told = checkpoint.config_of(resume, **asked) if resume else tl.TrainConfig(**asked)
    result = tl.train(told, out=out, resume=resume)
    if int(os.environ.get("RANK", "0")):  # under torchrun the first process reports
        return None
    layers = enumerate(zip(result.density, result.dead, strict=True))
    rows = [{"layer": number, "density": share, "dead neurons": dead} for number, (share, dead) in layers]
    said = f"train: {result.validation_bits_per_byte:.3f} bits per byte on held-out text, "
    said += f"mean nnz {result.mean_nnz:.1f} of {result.config.d_ff}, {result.seconds:.0f} s"
    said += f"; the model is in {out or resume}" if out or resume else ""
    return Answer(result.summary(), f"{records.table(rows)}\n{said}")


def prepare(
    text: Annotated[str, "a file, a folder of files, or hf:owner/name?bytes=10e9, that much of a dataset"],
    *,
    out: Annotated[Path, "a new folder, for twell-lab train --text"],
    tokenizer: Annotated[str | None, "bytes, bpe:4096 (a BPE of that size, trained here), or a file [bytes]"] = None,
) -> Answer:
    """Read a text of any length once, encode it, and keep its tokens for training."""
    from ..training.text import source

    read = source.prepare(text, out, tokenizer=tokenizer)
    training, validation = (len(part.tokens) for part in read.split())
    said = (
        f"prepare: {read.size:,} bytes of {read.name} as {len(read.tokens):,} {read.tokenizer.unit}, {validation:,} of "
        f"them held out; twell-lab train --text {shlex.quote(str(out))} reads them"
    )
    return Answer({**read.describe(), "training_tokens": training, "validation_tokens": validation}, said)


def predict(
    gpu: Annotated[str, 'a GPU of data/gpus.json, such as "RTX 4090"; "list" names all'],
    *,
    tokens: Annotated[Sequence[int], "tokens at once"] = (1, 16, 256, 2048, 16384),
    d_model: Annotated[int, "the layer's width"] = 2048,
    d_ff: Annotated[int, "its neurons"] = 5632,
    nnz: Annotated[float, "mean number of neurons firing for a token"] = 29.0,
    gated: Annotated[bool, "a layer with a gate"] = True,
) -> Answer:
    """Say what a layer should take on a GPU that you do not have."""
    from ..analysis import predict

    if gpu == "list":
        return Answer(names := [sheet["name"] for sheet in predict.datasheets()], "\n".join(names))
    rows = predict.predict(gpu, nnz, d_model, d_ff, gated=gated, tokens=tokens)
    columns = {"tokens": "tokens", "path": "path", "ms": "ms", "x_dense": "x dense", "read_mb": "MB of weights needed"}
    source = "from the vendor's figures and the shares that an H100 reaches"
    kind, rates = "gated" if gated else "plain", predict.rates_of(gpu)
    layer = f"a {kind} layer of {d_model:,} x {d_ff:,} in {rates.dtype}, of which {nnz:g} neurons fire"
    lines = [records.table(rows, columns), f"predict: {layer}, on {rates.device}, {source}"]
    lines += [
        f"predict: {row['layers']} layers recorded on an {row['gpu']} would be predicted as {row['least']:.2f} to "
        f"{row['most']:.2f} times what they took, {row['median']:.2f} in the middle"
        for row in predict.errors()
    ]
    return Answer(rows, "\n".join(lines))


def course(
    folder: Annotated[Path, "where; notebooks that are there stay as they are"] = Path("twell-lab-course"),
    *,
    open: Annotated[bool, "open JupyterLab there"] = True,
    alone: Annotated[bool, "links lead to the repository, for notebooks that are opened one by one"] = False,
) -> Answer:
    """Write the course's notebooks, to be filled in, into a folder and open JupyterLab there."""
    from ..course import edition

    if open and find_spec("jupyterlab") is None:
        from .doctor import install_command

        raise StackError(f"JupyterLab is not installed; accepted: --no-open, or first {install_command('course')}")
    check_folder(folder)
    new, stayed = edition.write(folder, alone)
    notebooks, status = [name for name in new if name.endswith(".ipynb")], 0
    said = f"course: {len(notebooks)} new notebooks are in {folder}"
    said += f"; as they were, since they are there and differ: {', '.join(stayed)}" if stayed else ""
    if open:
        print(f"{said}; opening JupyterLab there; Ctrl-C ends it", file=sys.stderr)
        lab = subprocess.Popen([sys.executable, "-m", "jupyterlab", str(folder)])
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C JupyterLab asks whether it should end
        try:
            status = lab.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    return Answer({"folder": str(folder), "notebooks": notebooks, "stayed": stayed}, said, status)


def submit(
    file: Annotated[Path, "a CUDA source with the kernel down"],
    *,
    out: Annotated[Path, "save the record here [this folder]"] = Path(),
) -> Answer:
    """Judge a kernel of the capstone, which runs here as any program does, and write a record of its medal."""
    from ..course.capstone import data as capstone

    check_folder(out)
    judged, on_gpu, made = capstone.submit(file)
    lines = [f"submit: {line}" for line in (judged, on_gpu) if line]
    if made is None:
        return Answer({"medal": None, "said": judged}, "\n".join(lines), status=1)
    saved = made.save(out)
    columns = {key: key for key in ("path", "ms", "spread", "device", "tokens")}
    lines += [records.table(made.rows[1:], columns)] if made.rows[1:] else []
    return Answer(made.to_json(), "\n".join([*lines, f"submit: saved {saved}"]))


def grade(folders: Annotated[Sequence[Path], "in which a reader worked on the notebooks, who has its name"]) -> Answer:
    """Say which exercises were solved in each of some folders, one a reader's."""
    from ..course import progress

    rows = progress.grades(folders)
    return Answer(rows, records.table(rows))


def record(
    name: Annotated[str | None, "without a name, the names are listed"] = None,
    *,
    out: Annotated[Path | None, "where the record goes [data/records of a checkout, else the working folder]"] = None,
    rivals: Annotated[Path | None, "for arena only: files NAME.py with what is timed beside; these are run"] = None,
) -> Answer:
    """Make one of the recordings that the course's figures come from."""
    from .recordings import RECORDINGS, make

    names = sorted(RECORDINGS)
    if name is None:
        return Answer(names, "\n".join(names))
    if name not in names:
        raise InputError(f"there is no recording {name!r:.200}; accepted: {', '.join(names)}")
    if rivals is not None and name != "arena":
        raise InputError(f"{name} takes no --rivals; accepted: with arena")
    folder = out or core.new_records_dir()
    check_folder(folder)
    made, path = make(name, folder, *([rivals] if rivals else []))
    return Answer(made.to_json(), f"{made}\nrecord: saved {path}")


def list_records(
    kind: Annotated[str | None, "list the rows of these"] = None,
    *,
    folder: Annotated[Path | None, "another folder than data/records"] = None,
    verify: Annotated[bool, "only check that each kernel was tested on a GPU, or is named as untested"] = False,
) -> Answer:
    """List the records that there are, or the rows of one kind."""
    if verify:
        try:
            why, holds = records.verify(folder), True
        except RecordError as error:
            why, holds = str(error), False
        value = {"holds": holds, "kernels": records.kernel_hashes(), "why": why}
        return Answer(value, f"records: {why}", int(not holds))
    if folder is not None and not folder.is_dir():
        raise InputError(f"--folder is {str(folder)!r}; an existing folder of records is accepted")
    recorded = sorted(records.load_all(folder), key=lambda record: record.name)
    if kind is None:
        rows = [_summary(record) for record in recorded]
        said = "records: none in this folder yet; on a GPU, twell-lab record makes them"
        return Answer(rows, f"{records.table(rows)}\ntwell-lab records KIND lists the rows of one" if rows else said)
    chosen = [record for record in recorded if record.name == kind]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(record.name for record in recorded))
        raise InputError(f"there is no record {kind!r:.200}; accepted: {kinds}")
    rows = records.flat_rows(chosen) or [{"record": record.name, **row} for record in chosen for row in record.rows]
    return Answer(rows, "\n\n".join(map(str, chosen)))


def _summary(record: records.Record) -> dict:
    devices = {row["device"] for row in record.rows if isinstance(row.get("device"), str)}
    devices = devices or {gpu["name"] for gpu in record.machine.get("gpus") or ()} or {"CPU"}
    state = "stale" if records.stale(record) else "current"
    state += ", cut off" if "unfinished" in record.notes else ", some left out" if "left_out" in record.notes else ""
    said = {"kind": record.name, "device": ", ".join(sorted(devices)), "date": record.date[:10]}
    return said | {"rows": len(record.rows), "state": state}
