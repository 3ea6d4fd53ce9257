"""The `twell-lab` command. Each subcommand imports what it needs when it runs, so that `--help` is quick.

Exit status: 0 done; 1 a check failed; 2 a mistake in the input or the set-up, which one line on stderr names;
130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tqdm import tqdm

from .. import __version__
from ..core import InputError, RecordError, TwellError, check_folder
from . import (
    analysis_commands,
    bench_command,
    course_command,
    sparsify_command,
    speak_commands,
    submit_command,
    terminal,
    train_command,
)
from .options import DTYPES, TourOptions, add_device, add_fields, given, path, positive, seconds, source, whole
from .terminal import Answer, terminated_like_interrupted

# The options of `record` that not all recordings take.
_SIZES = ("bench-0.5B", "bench-1B", "bench-1.5B", "bench-2B")
_LIMITED = (
    *("attack", *_SIZES, "comparison", "inference", "model", "model-paths", "pruning", "thresholds"),
    *("trained", "training"),
)
_TAKEN_BY = {"seed": ("attack",), "cases": ("attack",), "seconds": _LIMITED, "at_once": ("course",)}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
        _share_cores(arguments)
    try:
        with terminal.ready() as output:
            return _run(arguments, output)
    except TwellError as error:
        number = os.environ.get("RANK", "0")  # under torchrun each process reports its own error
        terminal.tell(f"twell-lab{'' if number == '0' else f', process {number}'}: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError with one of these wordings where it cannot allocate memory on the CPU.
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate|alloc_cpu", str(error)):
            raise
        terminal.tell("twell-lab: this does not fit into memory; smaller sizes are accepted")
        return 2
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun one process reports it for all
            terminal.tell(f"\ntwell-lab: {_how_to_go_on(error, arguments)}")
        return 130
    except OSError as error:  # an error of a file or device that is handled nowhere else
        if error.errno is None:
            raise
        what = "the system says" if error.filename is None else repr(error.filename)
        terminal.tell(f"twell-lab: {what}: {error.strerror}")
        return 2


def _share_cores(arguments: Sequence[str]) -> None:
    """Have torch's threads sleep while they wait, in a training on a machine that others keep busy. To be called before
    torch is loaded.

    Threads that spin take the core from the thread that they wait for: a step of 35 ms took from 300 ms to seconds
    beside other programs, and 90 ms where they sleep. On an idle machine it takes 52 ms where they sleep, so there they
    spin."""
    if arguments[:1] not in (["train"], ["tour"]) or not hasattr(os, "getloadavg"):
        return
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run(arguments: list[str], output: terminal.Stream) -> int:
    """Do what these arguments ask for and write all of the output. Returns the exit status."""
    try:
        try:
            if arguments[:2] == bench_command.MODEL.split():  # two words, one command
                arguments = [bench_command.MODEL, *arguments[2:]]
            parser = _parser(arguments)
            _check_command(parser, arguments)
            options = parser.parse_args(arguments)
            answer = options.run(options)  # None where another process of torchrun's gives the answer
            if answer is not None:
                answer.say(options.json)
        except SystemExit as stopped:
            if not stopped.code:  # after --help or --version; argparse ignores that it could not print
                output.flush()
                if output.failed is not None:
                    raise output.failed from None
            raise
        output.flush()
        return answer.status if answer else 0
    except OSError as error:
        if error is not output.failed:
            raise
        if isinstance(error, BrokenPipeError):  # the program that reads our output (head, a pager) has ended: no error
            return 0
        raise InputError(f"the output cannot be written: {error.strerror}") from None


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """End with the help where there is no argument; and as argparse does, but with the most similar command's name,
    where the first word is none of the commands, or another one follows `bench`."""
    names = parser.get_default("commands")
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    first, second = arguments[0], next(iter(arguments[1:]), "-")
    if first == "bench" and not second.startswith("-"):
        named = "" if difflib.get_close_matches(second, ["model"]) else f" {shlex.quote(second)}"
        parser.error(
            f"bench takes no {second!r:.80}, but options; did you mean: twell-lab {bench_command.MODEL}{named:.80}"
        )
    if first.startswith("-") or first in names:
        return
    alike = difflib.get_close_matches(first, names, n=1)
    meant = f"did you mean {alike[0]!r}? " if alike else ""
    parser.error(f"there is no command {first!r:.80}; {meant}accepted: {', '.join(names)}")


def _how_to_go_on(error: BaseException, arguments: list[str]) -> str:
    """Return what was interrupted, and the command line that goes on with it or runs it again."""
    # Another Ctrl-C may have come while the exception of a saved training, which names its folder, was on its way.
    while not hasattr(error, "folder") and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__
    folder = getattr(error, "folder", None)  # of checkpoint.Interrupted
    if folder is None:
        return f"interrupted; to run it again: {_typed(arguments)}"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return f"{error}; to go on: torchrun as before, with --resume {shlex.quote(folder)}"
    return f"{error}; to go on: {_typed(['train', '--resume', folder])}"


def _typed(arguments: list[str]) -> str:
    """The `twell-lab` command with these arguments, as one would type it here."""
    folder, name = os.path.split(sys.argv[0])
    if not name.startswith("twell-lab"):
        started = ["python", "-m", "twell_lab"]
    elif folder in os.environ.get("PATH", "").split(os.pathsep):
        started = ["twell-lab"]
    else:
        started = [sys.argv[0]]
    return shlex.join([*started, *arguments])


def _parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the command line. It knows the options of `train` only where `arguments` ask for that command,
    because they are the fields of a class whose import needs torch."""
    parser = argparse.ArgumentParser(
        prog="twell-lab", description="How activation sparsity in a language model becomes real GPU speed."
    )
    parser.add_argument("--version", action="version", version=f"twell-lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text[0].lower() + text[1:].rstrip("."), description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
        return added

    command("doctor", _doctor, "Say what this machine has, what will run where, and what is missing.")

    tour = command("tour", _tour, "Train with and without L1, profile, pack, time, and write a page.")
    add_fields(tour, TourOptions)
    tour.add_argument(
        "--render",
        metavar="TOUR_JSON",
        type=path,
        help="only draw the page of an earlier tour, of this or another machine",
    )

    train = command("train", train_command.run, "Train a small ReLU language model, with an L1 penalty if asked for.")
    if "train" in arguments:
        train_command.add_options(train)

    prepared = command(
        "prepare", _prepare, "Read a text of any length once, encode it, and keep its tokens for training."
    )
    prepared.add_argument(
        "text",
        type=source,
        metavar="TEXT",
        help="a file, a folder of files, or "
        "hf:owner/name?bytes=10e9 for a Hugging Face dataset, all of it unless ?bytes says how much",
    )
    prepared.add_argument(
        "--out", metavar="DIR", type=path, required=True, help="a new folder, for twell-lab train --text"
    )
    prepared.add_argument(
        "--tokenizer",
        metavar="WORD",
        help="bytes, bpe:4096 (a BPE of that size, trained on the text's beginning), or a file [bytes]",
    )

    sample = command("sample", speak_commands.sample, "Let a saved model continue a text, and time it.")
    speak_commands.add_sample_options(sample)

    for name, run, add_options, text in analysis_commands.COMMANDS:
        add_options(command(name, run, text))

    swapped = command("sparsify", sparsify_command.run, "Save a model with a plan of its layers beside it.")
    sparsify_command.add_options(swapped)

    export = command("export", speak_commands.export, "Write a saved model as a LlamaForCausalLM that others read.")
    speak_commands.add_export_options(export)

    bench = command(
        "bench", bench_command.layer, "Check and time a sparse feed-forward layer against torch's dense one."
    )
    bench_command.add_layer_options(bench)
    whole_model = command(
        bench_command.MODEL, bench_command.model, "Check and time a whole model, dense beside sparse."
    )
    bench_command.add_model_options(whole_model)
    add_device(bench, "+")
    add_device(whole_model)

    course_command.add_options(
        command("course", course_command.run, "Copy the course's notebooks into a folder and open JupyterLab there.")
    )

    submit_command.add_options(
        command("submit", submit_command.run, "Judge a kernel of the capstone and write a record of its medal.")
    )

    record = command("record", _record, "Make one of the recordings that the course's figures come from.")
    record.add_argument("name", nargs="?", metavar="NAME", help="without a name, the names are listed")
    record.add_argument(
        "--out",
        metavar="DIR",
        type=path,
        help="where the record goes [data/records of a checkout, else the working folder]",
    )
    record.add_argument("--seed", type=whole, metavar="N", help="for attack only: draw other cases")
    record.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="for attack, and recordings of large tables: how long at most",
    )
    record.add_argument("--cases", type=positive, metavar="N", help="for attack only: how many cases")
    record.add_argument(
        "--at-once", type=positive, metavar="N", help="for course only: how many notebooks run at once [1]"
    )

    built = command("compile", _compile, "Compile the kernels for machines that have no compiler.")
    built.add_argument("out", metavar="DIR", type=path, help="a folder; TWELL_LAB_CUBINS names it on those machines")
    built.add_argument(
        "--arch", nargs="+", default=["sm_90"], metavar="ARCH", help="of the GPUs, sm_75 to sm_120 [sm_90]"
    )
    built.add_argument(
        "--dtype",
        choices=DTYPES,
        nargs="+",
        default=["bfloat16"],
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)} [bfloat16]",
    )
    built.add_argument("--d-model", type=positive, nargs="+", default=[2048], metavar="N", help="model widths [2048]")

    listed = command("records", _records, "List every recorded measurement.")
    listed.add_argument("--folder", metavar="DIR", type=path, help="another folder than data/records")
    listed.add_argument(
        "--verify",
        action="store_true",
        help="list nothing; check that the present kernels were tested on a GPU or are named as untested",
    )
    parser.set_defaults(commands=tuple(commands.choices))
    return parser


# ---- the commands ----------------------------------------------------------------------------------------


def _doctor(options) -> Answer:
    from .doctor import examine

    findings = examine()
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.topic:<{width}}  {finding.text}")
        if finding.command:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.command}")
    return Answer([asdict(finding) for finding in findings], "\n".join(lines))


def _tour(options) -> Answer:
    if options.render is not None:
        from .page import render_file

        drawn = render_file(options.render, options.out or TourOptions.out)
        return Answer(json.dumps({"page": str(drawn)}), f"tour: the page is {drawn}")
    from . import tour as tour_module

    record, saved, page = tour_module.run(TourOptions(**given(options, TourOptions)))
    where = (
        f"the page is {page}" if page else f"the record is {saved}, and twell-lab tour --render {saved} draws its page"
    )
    taken = sum(record.notes["tour"]["seconds"].values())
    return Answer(record.to_json(), f"{tour_module.summary(record)}\ntour: done in {taken:.0f} s; {where}")


def _prepare(options) -> Answer:
    from ..training.text.prepared import prepare

    with tqdm(unit="B", unit_scale=True, leave=False, disable=None) as bar:
        made = prepare(
            options.text, options.out, tokenizer=options.tokenizer, on_bytes=lambda size: bar.update(size - bar.n)
        )
    training, validation = (len(part.tokens) for part in made.split())
    return Answer(
        {**made.describe(), "training_tokens": training, "validation_tokens": validation},
        f"prepare: {made.size:,} bytes of {made.name} as {len(made.tokens):,} {made.tokenizer.unit}, {validation:,} "
        f"of them held out; twell-lab train --text {shlex.quote(str(options.out))} reads them",
    )


def _record(options) -> Answer:
    from .. import core, records
    from . import recordings

    names = sorted(recordings.RECORDINGS)
    if options.name is None:
        return Answer(json.dumps(names), "\n".join(names))
    if options.name not in names:
        raise InputError(f"there is no recording {options.name!r:.200}; accepted: {', '.join(names)}")
    told = {name: value for name in _TAKEN_BY if (value := getattr(options, name)) is not None}
    if refused := [name for name in told if options.name not in _TAKEN_BY[name]]:
        takers = _TAKEN_BY[refused[0]]
        accepted = f"with {' and '.join(takers)}, which {'do' if len(takers) > 1 else 'does'}"
        raise InputError(f"{options.name} takes no --{refused[0].replace('_', '-')}; accepted: {accepted}")
    where = options.out or core.new_records_dir()
    check_folder(where)
    recording, unfinished = recordings.RECORDINGS[options.name], records.Unfinished(where)
    if "keep" in inspect.signature(recording).parameters:
        told["keep"] = unfinished.write
    try:
        with terminated_like_interrupted():  # what was measured is saved (recordings)
            record = recording(**told)
        saved = f"record: saved {record.save(where)}"
    except BaseException:
        if unfinished.path is not None:
            terminal.tell(f"record: what it has so far is in {unfinished.path}")
        raise
    unfinished.remove()
    rows = records.flat_rows([record])
    return Answer(record.to_json(), f"{records.table(rows, records.COLUMNS)}\n{saved}" if rows else saved)


def _compile(options) -> Answer:
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


def _records(options) -> Answer:
    from .. import records
    from ..records import kernel_hashes

    if options.verify:
        try:
            why, holds = records.verify(options.folder), True
        except RecordError as error:
            why, holds = str(error), False
        value = {"holds": holds, "kernels": kernel_hashes(), "why": why}
        return Answer(value, f"records: {why}", int(not holds))
    if options.folder is not None and not options.folder.is_dir():
        raise InputError(f"--folder is {str(options.folder)!r}; an existing folder of records is accepted")
    rows = records.flat_rows(records.load_all(options.folder))
    table = records.table(rows, {"record": "record", **records.COLUMNS, "date": "date", "stale": "stale"})
    none = "records: none in this folder yet; on a GPU, twell-lab record makes them"
    cut = [
        f"unfinished: {path.name!r}, of a recording that was cut off or goes on; without .unfinished it is a record"
        for path in records.unfinished(options.folder)
    ]
    return Answer(rows, "\n".join([table if rows else none, *cut]))
