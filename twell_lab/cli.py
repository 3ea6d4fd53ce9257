"""The `twell-lab` command. Each subcommand imports what it needs when it runs, so `--help` is quick.

Exit status: 0 done, 1 a check failed, 2 a mistake in the input or the set-up (one line on stderr says which),
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from . import terminal, train_command
from .errors import InputError, RecordError, TwellError
from .files import check_folder, check_target, strict_json
from .options import path, positive, seconds, source, whole

_ROW_COLUMNS = {"device": "device", "dtype": "dtype", "tokens": "tokens", "d_model": "d_model",
                "d_ff": "d_ff", "nnz": "mean nnz", "path": "path", "ms": "ms", "spread": "spread",
                "x_dense": "x dense"}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    if arguments is None:  # this is what the process does, and all that it does
        arguments = sys.argv[1:]
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(signal.SIGINT, _interrupt_once)
    try:
        with terminal.ready() as output:
            return _run(arguments, output)
    except TwellError as error:
        number = os.environ.get("RANK", "0")  # under torchrun each process speaks for itself
        terminal.tell(f"twell-lab{'' if number == '0' else f', process {number}'}: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for a CPU allocation that fails, only this wording.
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate|alloc_cpu", str(error)):
            raise
        terminal.tell("twell-lab: this does not fit into memory; smaller sizes are accepted")
        return 2
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGINT) is _interrupt_once:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        while not hasattr(error, "folder") and isinstance(error.__context__, KeyboardInterrupt):  # one came while the first was on its way
            error = error.__context__
        if folder := getattr(error, "folder", None):  # checkpoint.Interrupted
            several = int(os.environ.get("WORLD_SIZE", "1")) > 1
            again = f"torchrun as before, with --resume {shlex.quote(folder)}" if several else _again(["train", "--resume", folder])
            said = f"{error}; to go on: {again}"
        else:
            said = f"interrupted; to run it again: {_again(arguments)}"
        if os.environ.get("RANK", "0") == "0":  # under torchrun one process speaks for all
            terminal.tell(f"\ntwell-lab: {said}")
        return 130
    except OSError as error:  # a file or device that nothing else has a word for
        if error.errno is None:
            raise
        what = "the system says" if error.filename is None else repr(error.filename)
        terminal.tell(f"twell-lab: {what}: {error.strerror}")
        return 2


def _run(arguments: list[str], output: terminal.Stream) -> int:
    """The exit status of what these arguments ask for, once all of the output is written."""
    try:
        try:
            options = _parser().parse_args(arguments)
            status = options.run(options) or 0
        except SystemExit as stopped:
            if not stopped.code:  # --help, which argparse prints without a word if it cannot
                output.flush()
                if output.failed is not None:
                    raise output.failed from None
            raise
        output.flush()
        return status
    except BrokenPipeError:
        # The reader of our output (head, a pager) went away: that is no error, and there is nobody to tell.
        return 0
    except OSError as error:
        if error is not output.failed:
            raise
        raise InputError(f"the output cannot be written: {error.strerror}") from None


def _interrupt_once(number: int, frame) -> None:
    """Ctrl-C is an exception once: another one, while that is dealt with and Python ends, would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _again(arguments: list[str]) -> str:
    """The command line that was interrupted, as one would type it here."""
    folder, name = os.path.split(sys.argv[0])
    if not name.startswith("twell-lab"):
        started = ["python", "-m", "twell_lab"]
    elif folder in os.environ.get("PATH", "").split(os.pathsep):
        started = ["twell-lab"]
    else:
        started = [sys.argv[0]]
    return shlex.join([*started, *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twell-lab", description="How activation sparsity in a language model becomes real GPU speed.")
    parser.add_argument("--version", action="version", version=f"twell-lab {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text[0].lower() + text[1:].rstrip("."), description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
        return added

    command("doctor", _doctor, "Say what this machine has, what will run where, and what is missing.")

    tour = command("tour", _tour, "Train with and without L1, profile, pack, time, and write a page.")
    tour.add_argument("--text", type=source, metavar="PATH", help="a file or folder to train on, instead of the source of "
                                                     "Python's standard library")
    tour.add_argument("--out", metavar="DIR", type=path, default=Path("build/tour"),
                      help="where index.html and tour.json go (default: %(default)s)")
    tour.add_argument("--record-only", action="store_true", help="write tour.json alone; needs no plotly")
    tour.add_argument("--render", metavar="TOUR_JSON", type=path,
                      help="do nothing but draw the page of an earlier tour, from this or another machine")
    tour.add_argument("--quick", action="store_true",
                      help="a few steps and small layers, to see that it works")

    train = command("train", train_command.run, "Train a small ReLU language model, with an L1 penalty if asked for.")
    train_command.add_options(train)

    prepared = command("prepare", _prepare, "Read a text of any length once, encode it, and keep its tokens for training.")
    prepared.add_argument("text", type=source, metavar="TEXT", help="a file, a folder of files, or hf:owner/name?bytes=10e9 for a "
                          "Hugging Face dataset, all of it unless ?bytes says how much")
    prepared.add_argument("--out", metavar="DIR", type=path, required=True, help="a new folder, for twell-lab train --text")
    prepared.add_argument("--tokenizer", metavar="WORD", help="bytes, bpe:4096 (a BPE of that size, trained on the text's "
                          "beginning), or a file [bytes]")

    profile = command("profile", _profile, "Count which neurons of a saved model fire on a text.")
    profile.add_argument("model", metavar="DIR", type=path, help="a folder that twell-lab train --out wrote")
    profile.add_argument("--text", type=source, metavar="PATH", help="a file or folder, read whole, but of the text that the "
                         "model was trained on the held-out part (default: that of the source of Python's standard library)")
    profile.add_argument("--windows", type=positive, default=256, metavar="N",
                         help="how many windows (default: %(default)s)")
    profile.add_argument("--out", metavar="FILE", type=path, help="save the counts here, as JSON")

    plan = command("plan", _plan, "Choose a path for every layer of a saved model: dense, TwELL or hot/cold.")
    plan.add_argument("model", metavar="DIR", type=path, help="a folder that twell-lab train --out wrote")
    plan.add_argument("--text", type=source, metavar="PATH", help="a file or folder, as for profile (default: the held-out "
                                                     "part of the source of Python's standard library)")
    plan.add_argument("--windows", type=positive, default=256, metavar="N",
                      help="how many windows to profile, and how many others to time on (default: %(default)s)")
    plan.add_argument("--tokens", type=positive, nargs="+", default=[1, 64, 2048, 16384], metavar="N",
                      help="tokens at once to plan for (default: 1 64 2048 16384)")
    plan.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    plan.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], metavar="DTYPE",
                      help="bfloat16, float16 or float32 (default: bfloat16 on a GPU, else float32)")
    plan.add_argument("--predict-only", action="store_true", help="time none of the candidates")
    plan.add_argument("--all", action="store_true", help="print every candidate, not only what was chosen")
    plan.add_argument("--out", metavar="FILE", type=path, help="save the plan here, as JSON")

    bench = command("bench", _bench, "Check and time a sparse feed-forward layer against torch's dense one.")
    bench.add_argument("--tokens", type=positive, nargs="+", default=[1, 8, 64], metavar="N",
                       help="one or more (default: 1 8 64)")
    bench.add_argument("--d-model", type=positive, default=2048, metavar="N", help="default: %(default)s")
    bench.add_argument("--d-ff", type=positive, default=5632, metavar="N", help="default: %(default)s")
    bench.add_argument("--nnz", type=float, default=29.0, metavar="X",
                       help="mean number of neurons firing for a token (default: %(default)s)")
    bench.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], nargs="+", metavar="DTYPE",
                       help="bfloat16, float16 or float32 (default: bfloat16 on a GPU, else float32)")
    bench.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    bench.add_argument("--workload", choices=["lognormal", "uniform"], default="lognormal",
                       help="how neurons share the firing (default: %(default)s)")
    bench.add_argument("--compiled", action="store_true", help="time torch.compile's dense layer too")
    bench.add_argument("--seconds", type=seconds, default=2.0, metavar="S",
                       help="how long to measure each size on a CPU (default: %(default)s)")
    bench.add_argument("--out", metavar="DIR", type=path, help="save the records here")

    record = command("record", _record, "Make one of the recordings that the course's figures come from.")
    record.add_argument("name", nargs="?", metavar="NAME", help="without a name, the names are listed")
    record.add_argument("--out", metavar="DIR", type=path,
                        help="where the record goes (default: data/records)")
    record.add_argument("--seed", type=whole, metavar="N", help="of attack alone: other cases")
    record.add_argument("--seconds", type=seconds, metavar="S", help="of attack alone, on a GPU: how long")
    record.add_argument("--cases", type=positive, metavar="N", help="of attack alone: how many")

    built = command("compile", _compile, "Compile the kernels for machines that have no compiler.")
    built.add_argument("out", metavar="DIR", type=path,
                       help="where the cubins go; name it in TWELL_LAB_CUBINS there")
    built.add_argument("--arch", nargs="+", default=["sm_90"], metavar="ARCH",
                       help="sm_75 ... (default: sm_90)")
    built.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], nargs="+", default=["bfloat16"],
                       metavar="DTYPE", help="bfloat16, float16, float32 (default: bfloat16)")
    built.add_argument("--d-model", type=positive, nargs="+", default=[2048], metavar="N",
                       help="model widths (default: 2048)")

    kept = command("records", _records, "List every recorded measurement.")
    kept.add_argument("--folder", metavar="DIR", type=path, help="another folder than data/records")
    kept.add_argument("--verify", action="store_true",
                      help="instead, check that these kernels were tested on a GPU or are named as untested")
    return parser


def _version() -> str:
    from . import __version__
    return __version__


def _print_json(value) -> None:
    print(strict_json(value, indent=1))


# ---- the commands ----------------------------------------------------------------------------------------


def _doctor(options) -> int:
    from dataclasses import asdict

    from .doctor import examine
    findings = examine()
    if options.json:
        _print_json([asdict(finding) for finding in findings])
        return 0
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<8} {finding.topic:<{width}}  {finding.text}")
        if finding.command:
            print(f"{'':<8} {'':<{width}}  -> {finding.command}")
    return 0


def _tour(options) -> int:
    if options.render is not None:
        from .page import render_file
        page = render_file(options.render, options.out)
        print(strict_json({"page": str(page)}) if options.json else f"tour: the page is {page}")
        return 0
    from . import tour
    record, saved, page = tour.run(tour.Options(text=options.text, out=options.out, quick=options.quick,
                                                record_only=options.record_only))
    if options.json:
        print(record.to_json(), end="")
        return 0
    print(tour.summary(record))
    taken = f"tour: done in {sum(record.notes['tour']['seconds'].values()):.0f} s"
    print(f"{taken}; the page is {page}" if page else
          f"{taken}; the record is {saved}, and twell-lab tour --render {saved} draws its page")
    return 0


def _profile(options) -> int:
    from .model import LanguageModel
    from .profile import profile
    if options.out is not None:
        check_target(options.out)
    model = LanguageModel.load(options.model)
    part, windows = _windows(options.text, Path(options.model), options.windows, model.config)
    firing = profile(model, windows.split(32))
    if options.out is not None:
        firing.save(options.out)
    rows = firing.table()
    if options.json:
        _print_json(rows)
        return 0
    print(firing)
    print(f"profile: {firing.tokens:,} tokens of {part.name}" +
          (f"; the counts are in {options.out}" if options.out else ""))
    return 0


def _prepare(options) -> int:
    from .prepared import prepare
    with _bytes_bar() as seen:
        made = prepare(options.text, options.out, tokenizer=options.tokenizer, on_bytes=seen)
    training, validation = made.split()
    if options.json:
        _print_json({**made.describe(), "training_tokens": len(training.tokens), "validation_tokens": len(validation.tokens)})
        return 0
    print(f"prepare: {made.size:,} bytes of {made.name} as {made.count:,} {made.tokenizer.unit}, {len(validation.tokens):,} of them held out; "
          f"twell-lab train --text {shlex.quote(str(options.out))} reads them")
    return 0


@contextmanager
def _bytes_bar():
    """Calls with the bytes so far move a bar on stderr, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(unit="B", unit_scale=True, file=sys.stderr, leave=False, disable=None) as bar:
        yield lambda size: bar.update(size - bar.n)


def _windows(given: str | None, model: Path, count: int, config):
    """(the text, windows [count, context] spread over it): of the text that the model was trained on, of the default one and
    of a prepared one the held-out part, another whole; read through the tokenizer that training left in the model's folder,
    or as bytes. config: the model's."""
    from .checkpoint import text_of
    from .prepared import PreparedText
    from .text import spread_windows
    from .texts import load_any
    own = model / "tokenizer.json"
    text = load_any(given, tokenizer=own if own.is_file() else None)
    if text.vocabulary != config.vocabulary:
        read = f"the tokenizer in {str(own)!r}" if own.is_file() else f"bytes, as there is no {str(own)!r}"
        raise InputError(f"the model has a vocabulary of {config.vocabulary}, and {text.vocabulary} would be read: {read}; "
                         "accepted: a model with the tokenizer it was trained with beside it")
    seen = given is None or isinstance(text, PreparedText) or text.sha256 == text_of(model).get("sha256")
    part = text.split()[1] if seen else text
    if len(part.tokens) <= config.context:
        raise InputError(f"{part.name} has {len(part.tokens)} {part.tokenizer.unit}; the model reads windows of "
                         f"{config.context}, so at least {config.context + 1} are needed")
    return part, spread_windows(part.tokens, count, config.context)[:, :-1]


def _plan(options) -> int:
    import torch

    from .bench import _device
    from .model import LanguageModel
    from .planner import plan
    from .profile import profile
    if options.out is not None:
        check_target(options.out)
    device = _device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = LanguageModel.load(options.model).to(device, dtype).requires_grad_(False)
    part, windows = _windows(options.text, Path(options.model), 2 * options.windows, model.config)
    # Every other window is profiled, and the ones between are timed: the same text, other tokens.
    firing = profile(model, windows[::2].split(32))
    made = plan(firing, model, tokens=options.tokens, device=device, measure=not options.predict_only,
                batches=windows[1::2].split(32) if len(windows) > 1 else None)
    if options.out is not None:
        made.save(options.out)
    if options.json:
        _print_json(made.table())
        return 0
    print("\n\n".join(map(str, made.layers)) if options.all else made)
    timed = f"timed on inputs {made.inputs}" if made.inputs else "nothing was timed"
    print(f"plan: from {firing.tokens:,} tokens of {part.name}; {timed}" +
          (f"; the plan is in {options.out}" if options.out else ""))
    return 0


def _bench(options) -> int:
    import torch

    from . import bench, records
    if options.out is not None:
        check_folder(options.out)
    made = []
    for name in options.dtype or [None]:
        for tokens in options.tokens:
            made.append(bench.ffn(tokens, options.d_model, options.d_ff, options.nnz,
                                  dtype=getattr(torch, name) if name else None, device=options.device,
                                  workload_kind=options.workload, compiled=options.compiled,
                                  seconds=options.seconds))
    saved = [str(record.save(options.out)) for record in made] if options.out is not None else []
    rows = records.flat_rows(made)
    if options.json:
        _print_json(rows)
        return 0
    print(records.table(rows, _ROW_COLUMNS))
    print("\n".join(f"bench: saved {path}" for path in saved), end="\n" if saved else "")
    return 0


def _record(options) -> int:
    from . import paths, recordings, records
    if options.name is None:
        names = sorted(recordings.RECORDINGS)
        print(strict_json(names) if options.json else "\n".join(names))
        return 0
    if options.name not in recordings.RECORDINGS:
        known = ", ".join(sorted(recordings.RECORDINGS))
        raise InputError(f"there is no recording {options.name!r:.200}; accepted: {known}")
    told = {name: value for name in ("seed", "seconds", "cases") if (value := getattr(options, name)) is not None}
    if told and options.name != "attack":
        raise InputError(f"{options.name} takes no --{next(iter(told))}; accepted: with attack")
    check_folder(options.out or paths.records_dir())
    record = recordings.RECORDINGS[options.name](**told)
    path = record.save(options.out)
    if options.json:
        print(record.to_json(), end="")
        return 0
    if rows := records.flat_rows([record]):
        print(records.table(rows, _ROW_COLUMNS))
    print(f"record: saved {path}")
    return 0


def _compile(options) -> int:
    import torch

    from . import jit
    from .prebuild import prebuild
    if unknown := sorted(set(options.arch) - set(jit.ARCHITECTURES)):
        raise InputError(f"--arch is {', '.join(unknown)!r:.80}; accepted: {', '.join(jit.ARCHITECTURES)}")
    dtypes = [getattr(torch, name) for name in options.dtype]
    names = prebuild(options.out, options.arch, dtypes, options.d_model, _progress if sys.stderr.isatty() else None)
    if options.json:
        _print_json(names)
    else:
        print(f"compile: {len(names)} cubins in {options.out}")
    return 0


def _progress(done: int, of: int, name: str) -> None:
    """One line on a terminal, written over until everything is there."""
    print(f"\r{done} of {of}: {name[:60]:60s}", end="\n" if done == of else "", file=sys.stderr, flush=True)


def _records(options) -> int:
    from . import records
    if options.verify:
        try:
            sentence, holds = records.verify(options.folder), True
        except RecordError as error:
            sentence, holds = str(error), False
        if options.json:
            _print_json({"holds": holds, "kernel_hash": records.kernel_hash(), "why": sentence})
        else:
            print(f"records: {sentence}")
        return 0 if holds else 1
    if options.folder is not None and not options.folder.is_dir():
        raise InputError(f"--folder is {str(options.folder)!r}; an existing folder of records is accepted")
    rows = records.flat_rows(records.load_all(options.folder))
    if options.json:
        _print_json(rows)
    elif rows:
        print(records.table(rows, {"record": "record", **_ROW_COLUMNS, "date": "date", "stale": "stale"}))
    else:
        print("records: none in this folder yet; on a GPU, twell-lab record makes them")
    return 0

