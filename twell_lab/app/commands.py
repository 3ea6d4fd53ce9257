"""The commands that need little more than a call: tour, train, prepare, course, submit, record, compile and records.
Each imports what it needs when it runs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec

from tqdm import tqdm

from .. import core, records
from ..core import InputError, RecordError, StackError, check_folder
from .options import given
from .terminal import Answer


def tour(options: Namespace) -> Answer:
    page = options.out / "index.html"
    if options.render is not None:
        from .page import render_file

        render_file(options.render, options.out)
        return Answer({"page": str(page)}, f"tour: the page is {page}")
    from . import tour

    record = tour.run(options.text, options.out, options.quick)
    seconds = sum(record.notes["tour"]["seconds"].values())
    return Answer(record.to_json(), f"{tour.summary(record)}\ntour: done in {seconds:.0f} s; the page is {page}")


def course(options: Namespace) -> Answer:
    """Write the student's edition of the notebooks into a folder and run JupyterLab there, whose exit status is then
    the command's. What is there already stays as it is."""
    from ..course import edition

    folder = options.folder
    if options.open and find_spec("jupyterlab") is None:
        from .doctor import install_command

        raise StackError(f"JupyterLab is not installed; accepted: --no-open, or first {install_command('course')}")
    check_folder(folder)
    new, stayed = edition.write(folder, options.alone)
    notebooks, status = [name for name in new if name.endswith(".ipynb")], 0
    said = f"course: {len(notebooks)} new notebooks are in {folder}"
    said += f"; as they were, since they are there and differ: {', '.join(stayed)}" if stayed else ""
    if options.open:
        print(f"{said}; opening JupyterLab there; Ctrl-C ends it", file=sys.stderr)
        lab = subprocess.Popen([sys.executable, "-m", "jupyterlab", str(folder)])
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C JupyterLab asks whether it should end
        try:
            status = lab.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    return Answer({"folder": str(folder), "notebooks": notebooks, "stayed": stayed}, said, status)


def submit(options: Namespace) -> Answer:
    """Judge a kernel in the simulator and, where there is one, on the GPU. Status 1, and no record, if it is wrong."""
    from ..course import capstone

    judged = capstone.submit(options.file)
    lines = [f"submit: {line}" for line in (judged.said, judged.on_gpu) if line]
    if judged.record is None:
        return Answer({"medal": None, "said": judged.judged.said}, "\n".join(lines), status=1)
    saved = judged.record.save(options.out)
    columns = {key: key for key in ("path", "ms", "spread", "device", "tokens")}
    lines += [records.table(judged.rows, columns)] if judged.rows else []
    return Answer(judged.record.to_json(), "\n".join([*lines, f"submit: saved {saved}"]))


def grade(options: Namespace) -> Answer:
    """Say who solved what: a row for each reader's folder."""
    from ..course import progress

    rows = progress.grades(options.folders)
    return Answer(rows, records.table(rows, {key: key for key in rows[0]}))


def record(options: Namespace) -> Answer:
    from .recordings import RECORDINGS, make, options_of

    names = sorted(RECORDINGS)
    if options.name is None:
        return Answer(names, "\n".join(names))
    if options.name not in names:
        raise InputError(f"there is no recording {options.name!r:.200}; accepted: {', '.join(names)}")
    asked = {key: value for key in ("seed", "seconds", "rivals") if (value := getattr(options, key)) is not None}
    for key in asked.keys() - options_of(options.name):
        takers = ", ".join(name for name in names if key in options_of(name))
        raise InputError(f"{options.name} takes no --{key}; accepted: with {takers}")
    folder = options.out or core.new_records_dir()
    check_folder(folder)
    made, path = make(options.name, folder, **asked)
    return Answer(made.to_json(), f"{made}\nrecord: saved {path}")


def compile_kernels(options: Namespace) -> Answer:
    import torch

    from ..cuda.compile import ARCHITECTURES
    from ..ops.kernels import prebuild

    if unknown := sorted(set(options.arch) - set(ARCHITECTURES)):
        raise InputError(f"--arch is {', '.join(unknown)!r:.80}; accepted: {', '.join(ARCHITECTURES)}")
    with tqdm(unit="cubin", disable=None) as bar:

        def built(done: int, of: int, name: str) -> None:
            bar.total = of
            bar.set_postfix_str(name[:60], refresh=False)
            bar.update(done - bar.n)

        dtypes = [getattr(torch, name) for name in options.dtype]
        names = prebuild(options.out, options.arch, dtypes, options.d_model, built)
    return Answer(names, f"compile: {len(names)} cubins in {options.out}")


def list_records(options: Namespace) -> Answer:
    if options.verify:
        try:
            why, holds = records.verify(options.folder), True
        except RecordError as error:
            why, holds = str(error), False
        value = {"holds": holds, "kernels": records.kernel_hashes(), "why": why}
        return Answer(value, f"records: {why}", int(not holds))
    if options.folder is not None and not options.folder.is_dir():
        raise InputError(f"--folder is {str(options.folder)!r}; an existing folder of records is accepted")
    recorded = sorted(records.load_all(options.folder), key=lambda record: record.name)
    if options.kind is None:
        rows = [_summary(record) for record in recorded]
        table = records.table(rows, {key: key for key in ("kind", "device", "date", "rows", "state")})
        none = "records: none in this folder yet; on a GPU, twell-lab record makes them"
        return Answer(rows, f"{table}\ntwell-lab records KIND lists the rows of one" if rows else none)
    chosen = [record for record in recorded if record.name == options.kind]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(record.name for record in recorded))
        raise InputError(f"there is no record {options.kind!r:.200}; accepted: {kinds}")
    rows = records.flat_rows(chosen) or [{"record": record.name, **row} for record in chosen for row in record.rows]
    return Answer(rows, "", quoted="\n\n".join(map(str, chosen)))


def _summary(record: records.Record) -> dict:
    devices = {row["device"] for row in record.rows if isinstance(row.get("device"), str)}
    devices = devices or {gpu["name"] for gpu in record.machine.get("gpus") or ()} or {"CPU"}
    part = ", cut off" if "unfinished" in record.notes else ", in part" if "left_out" in record.notes else ""
    return {
        "kind": record.name,
        "device": ", ".join(sorted(devices)),
        "date": record.date[:10],
        "rows": len(record.rows),
        "state": f"{'stale' if records.stale(record) else 'current'}{part}",
    }


def train(options: Namespace) -> Answer | None:
    """Train, save the run, and report the result; under torchrun only the first process reports."""
    from ..training import checkpoint, presets
    from ..training.config import TrainConfig
    from ..training.loop import train

    if options.config == "list":
        return Answer(presets.rows(), presets.table())
    asked = given(options, TrainConfig)
    if options.config is not None:
        asked = {**presets.of(options.config), **asked}
    if asked.get("activation") == "relu2" and options.resume is None and asked.get("from_") is None:
        asked.setdefault("gated", False)  # sparse layers compute the square in plain layers alone
    if options.checkpoint_every and not (options.out or options.resume):
        raise InputError(
            f"--checkpoint-every is {options.checkpoint_every} without --out; accepted: with --out, for the checkpoints"
        )
    config = checkpoint.config_of(options.resume, **asked) if options.resume else TrainConfig(**asked)
    result = train(config, out=options.out, resume=options.resume)
    if int(os.environ.get("RANK", "0")):
        return None
    layers = enumerate(zip(result.density, result.dead, strict=True))
    rows = [{"layer": number, "density": share, "dead neurons": dead} for number, (share, dead) in layers]
    where = options.out or options.resume
    return Answer(
        result.summary(),
        f"{records.table(rows, {key: key for key in rows[0]})}\n"
        f"train: {result.validation_bits_per_byte:.3f} bits per byte on held-out "
        f"text, mean nnz {result.mean_nnz:.1f} of {result.config.d_ff}, {result.seconds:.0f} s"
        + (f"; the model is in {where}" if where else ""),
    )


def prepare(options: Namespace) -> Answer:
    from ..training.text.source import prepare

    with tqdm(unit="B", unit_scale=True, leave=False, disable=None) as bar:
        on_bytes = lambda size: bar.update(size - bar.n)  # noqa: E731
        text = prepare(options.text, options.out, tokenizer=options.tokenizer, on_bytes=on_bytes)
    training, validation = (len(part.tokens) for part in text.split())
    return Answer(
        {**text.describe(), "training_tokens": training, "validation_tokens": validation},
        f"prepare: {text.size:,} bytes of {text.name} as {len(text.tokens):,} {text.tokenizer.unit}, {validation:,} "
        f"of them held out; twell-lab train --text {shlex.quote(str(options.out))} reads them",
    )
