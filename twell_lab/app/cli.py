"""The `twell-lab` command. Each subcommand imports what it needs when it runs, so that `--help` is quick.

Exit status: 0 done; 1 a check failed; 2 a mistake in the input or the set-up, which one line on stderr names;
130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from tqdm import tqdm

from .. import __version__
from ..core.errors import InputError, RecordError, TwellError
from ..core.files import check_folder, check_target, strict_json
from . import bench_command, course_command, speak_commands, terminal, train_command
from .bench_command import ROW_COLUMNS
from .inputs import model_and_windows
from .options import DTYPES, TourOptions, add_fields, given, number, path, positive, seconds, source, whole
from .terminal import Answer

if TYPE_CHECKING:
    from ..analysis.profile import FiringProfile

# The options of `record` that not all recordings take.
_TAKEN_BY = {"seed": ("attack",), "cases": ("attack",), "seconds": ("attack", "inference", "model", "training")}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    if arguments is None:  # this process does nothing else, so its handling of Ctrl-C may be changed
        arguments = sys.argv[1:]
        _share_cores(arguments)
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(signal.SIGINT, _interrupt_once)
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
        if signal.getsignal(signal.SIGINT) is _interrupt_once:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    except BrokenPipeError:
        # The program that reads our output (head, a pager) has ended. That is no error.
        return 0
    except OSError as error:
        if error is not output.failed:
            raise
        raise InputError(f"the output cannot be written: {error.strerror}") from None


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """End as argparse does, but with the most similar command's name, where the first word is none of the commands."""
    names = parser.get_default("commands")
    first = next(iter(arguments), "-")
    if first.startswith("-") or first in names:
        return
    alike = difflib.get_close_matches(first, names, n=1)
    meant = f"did you mean {alike[0]!r}? " if alike else ""
    parser.error(f"there is no command {first!r:.80}; {meant}accepted: {', '.join(names)}")


def _interrupt_once(number: int, frame) -> None:
    """Raise KeyboardInterrupt for the first Ctrl-C, and ignore further ones: while the first is handled or Python ends,
    they would print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt, where nobody handles it otherwise."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _how_to_go_on(error: BaseException, arguments: list[str]) -> str:
    """What was interrupted, and the command line that goes on with it or runs it again."""
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

    profile = command("profile", _profile, "Count which neurons of a saved model fire on a text.")
    plan = command("plan", _plan, "Choose a path for every layer of a saved model: dense, TwELL or hot/cold.")
    cut = command(
        "thresholds", _thresholds, "Choose what a model that was not trained to be sparse may set to zero: lossy."
    )
    for each, counts, kept in (
        (profile, "how many windows", "counts"),
        (plan, "how many windows to profile, and how many others to time on", "plan"),
        (cut, "how many windows to calibrate on, and how many others to measure the loss on", "thresholds"),
    ):
        each.add_argument(
            "model",
            metavar="MODEL",
            type=path,
            help="a folder that twell-lab train --out wrote, or one of transformers, or a repository of the Hub"
            + ("; or a profile that --out saved" if each is profile else ""),
        )
        each.add_argument(
            "--text",
            type=source,
            metavar="PATH",
            help="a file or folder, read whole; of the text that the model was trained on, only the held-out part "
            "[the held-out part of the source of Python's standard library]",
        )
        each.add_argument("--windows", type=positive, default=256, metavar="N", help=f"{counts} [%(default)s]")
        each.add_argument("--out", metavar="FILE", type=path, help=f"save the {kept} here, as JSON")
    profile.add_argument("--against", metavar="FILE", type=path, help="compare with the profile that --out saved here")
    plan.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[1, 64, 2048, 16384],
        metavar="N",
        help="tokens at once to plan for [1 64 2048 16384]",
    )
    plan.add_argument("--predict-only", action="store_true", help="time none of the candidates")
    plan.add_argument(
        "--for-graphs",
        action="store_true",
        help="decide by the time of CUDA graph replays instead of the wall time of plain calls; on a GPU",
    )
    plan.add_argument(
        "--memory",
        type=float,
        metavar="SHARE",
        help="the share of the model's bytes that copies of weights may take, such as 0.02 [any]",
    )
    plan.add_argument(
        "--reorder", action="store_true", help="plan for tl.sparsify(model, plan, reorder=True), which needs no copies"
    )
    plan.add_argument("--all", action="store_true", help="print every candidate, not only what was chosen")

    cut.add_argument(
        "--sparsity", type=number, default=0.5, metavar="S", help="the share of values to set to zero [%(default)s]"
    )
    cut.add_argument(
        "--method",
        choices=["cats", "teal"],
        default="cats",
        help="cats: behind the gate; teal: at the inputs of the projections [%(default)s]",
    )
    cut.add_argument("--greedy", action="store_true", help="give each layer its own sparsity, by measured errors")

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
    predict = command("predict", _predict, "Say what a layer should take on a GPU that you do not have.")
    predict.add_argument("gpu", metavar="GPU", help='a GPU of data/gpus.json, such as "RTX 4090"; "list" names all')
    predict.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[1, 16, 256, 2048, 16384],
        metavar="N",
        help="tokens at once [1 16 256 2048 16384]",
    )
    predict.add_argument("--d-model", type=positive, default=2048, metavar="N", help="the layer's width [%(default)s]")
    predict.add_argument("--d-ff", type=positive, default=5632, metavar="N", help="its neurons [%(default)s]")
    predict.add_argument(
        "--nnz", type=float, default=29.0, metavar="X", help="mean number of neurons firing for a token [%(default)s]"
    )
    predict.add_argument("--plain", action="store_true", help="a layer without a gate")
    predict.add_argument(
        "--workload",
        choices=["lognormal", "uniform"],
        default="lognormal",
        help="lognormal: some neurons fire far more often than others; uniform: all equally often [%(default)s]",
    )
    for each, several in ((plan, None), (bench, "+"), (whole_model, None)):
        each.add_argument("--device", help="cpu, cuda, cuda:1 [a GPU where there is one]")
        each.add_argument(
            "--dtype",
            choices=DTYPES,
            nargs=several,
            metavar="DTYPE",
            help=f"{', '.join(DTYPES)} [bfloat16 on a GPU, else float32]",
        )

    course_command.add_options(
        command("course", course_command.run, "Copy the course's notebooks into a folder and open JupyterLab there.")
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
        help="for attack, inference, model and training, on a GPU: how long at most",
    )
    record.add_argument("--cases", type=positive, metavar="N", help="for attack only: how many cases")

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
        return Answer(strict_json({"page": str(drawn)}), f"tour: the page is {drawn}")
    from . import tour as tour_module

    record, saved, page = tour_module.run(TourOptions(**given(options, TourOptions)))
    where = (
        f"the page is {page}" if page else f"the record is {saved}, and twell-lab tour --render {saved} draws its page"
    )
    taken = sum(record.notes["tour"]["seconds"].values())
    return Answer(record.to_json(), f"{tour_module.summary(record)}\ntour: done in {taken:.0f} s; {where}")


def _profile(options) -> Answer:
    from ..analysis.predict import verdict
    from ..analysis.profile import FiringProfile, profile

    if options.out is not None:
        check_target(options.out)
    other = None if options.against is None else FiringProfile.load(options.against)  # refused before the work
    spell = str
    if options.model.is_file():
        if options.text is not None:
            raise InputError(
                f"{str(options.model)!r} is a file, so it is read as a saved profile, which needs no --text"
            )
        firing, read = FiringProfile.load(options.model), str(options.model)
    else:
        model, part, windows, spell = model_and_windows(options, options.windows)
        firing, read = profile(model, windows.split(32)), part.name
    compared = None if other is None else firing.compare(other)
    if options.out is not None:
        firing.save(options.out)
    said = verdict(firing)
    value = {
        "tokens": firing.tokens,
        "of": read,
        "layers": firing.table(),
        "by_position": firing.by_position(),
        "heavy_first": firing.heavy_first,
        "by_token": firing.by_token(),
        "verdict": said,
        "against": None if compared is None else {"layers": compared.rows, "verdict": compared.verdict},
    }
    lines = [
        str(firing),
        *_by_place(firing, spell),
        f"profile: {firing.tokens:,} tokens of {read}" + (f"; the counts are in {options.out}" if options.out else ""),
        said,
        *([] if compared is None else [f"\nbeside {options.against}", str(compared)]),
    ]
    return Answer(value, "\n".join(lines))


def _by_place(firing: FiringProfile, spell: Callable[[int], str]) -> list[str]:
    """How much fires at the positions of a sequence, at neighbours and at which tokens, a line each. spell: a token as
    text."""
    from ..plots.data import share

    rows = [row for row in firing.by_position() if not row["first"] & (row["first"] - 1)]  # 0 and the powers of two
    places = [f"{row['first']}{'' if row['last'] == row['first'] else ' on'}: {share(row['density'])}" for row in rows]
    lines = [f"firing at positions {', '.join(places)}" if places else "firing by position: not known"]
    known = [row for row in firing.table() if row["neighbours_share"] is not None]
    spans = [
        " to ".join(share(end([row[name] for row in known])) for end in (min, max))
        for name in ("neighbours_share", "neighbours_by_chance")
        if known
    ]
    lines += [f"of what fires at a token or the next, at both: {spans[0]}; by chance {spans[1]}"] if known else []
    tokens = firing.by_token(least=8)
    many = min(5, len(tokens) // 2)
    said = [
        ", ".join(f"{spell(each['token'])} {each['x_mean']:.1f}x" for each in some if each["x_mean"] is not None)
        for some in (tokens[:many], tokens[::-1][:many])
    ]
    lines += [f"tokens at which most fire, of the mean: {said[0]}; least: {said[1]}"] if said[0] else []
    return lines


def _prepare(options) -> Answer:
    from ..training.text.prepared import prepare

    with tqdm(unit="B", unit_scale=True, leave=False, disable=None) as bar:
        made = prepare(
            options.text, options.out, tokenizer=options.tokenizer, on_bytes=lambda size: bar.update(size - bar.n)
        )
    training, validation = (len(part.tokens) for part in made.split())
    return Answer(
        {**made.describe(), "training_tokens": training, "validation_tokens": validation},
        f"prepare: {made.size:,} bytes of {made.name} as {made.count:,} {made.tokenizer.unit}, {validation:,} "
        f"of them held out; twell-lab train --text {shlex.quote(str(options.out))} reads them",
    )


def _plan(options) -> Answer:
    import torch

    from ..analysis.planner import plan
    from ..analysis.profile import profile
    from ..ops.measure import present_device

    if options.out is not None:
        check_target(options.out)
    device = present_device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model, part, windows, _ = model_and_windows(options, 2 * options.windows)
    model.to(device, dtype).requires_grad_(False)
    # Every second window is profiled; the windows between them, other tokens of the same text, are for timing.
    firing = profile(model, windows[::2].split(32))
    made = plan(
        firing,
        model,
        tokens=options.tokens,
        device=device,
        measure=not options.predict_only,
        batches=windows[1::2].split(32) if len(windows) > 1 else None,
        for_graphs=options.for_graphs,
        memory=options.memory,
        reorder=options.reorder,
    )
    if options.out is not None:
        made.save(options.out)
    shown = "\n\n".join(map(str, made.layers)) if options.all else made
    timed = f"timed on inputs {made.inputs}" if made.inputs else "nothing was timed"
    return Answer(
        made.table(),
        f"{shown}\nplan: from {firing.tokens:,} tokens of {part.name}; {timed}"
        + (f"; the plan is in {options.out}" if options.out else ""),
    )


def _thresholds(options) -> Answer:
    from ..models.thresholds import thresholds

    if options.out is not None:
        check_target(options.out)
    model, part, windows, _ = model_and_windows(options, 2 * options.windows)
    model.requires_grad_(False)
    # Every second window is calibrated on; the loss is measured on those between them.
    chosen = thresholds(model, windows[::2].split(32), options.sparsity, method=options.method, greedy=options.greedy)
    cost = chosen.loss(model, windows[1::2], bytes_per_token=_bytes_per_token(model, part, windows))
    if options.out is not None:
        chosen.save(options.out)
    return Answer(
        {"thresholds": chosen.table(), "spared": chosen.spared, "loss": cost.as_dict()},
        f"{chosen}\nthresholds: {cost}; of {part.name}, every second window was calibrated on, the others measured"
        + (f"; the thresholds are in {options.out}" if options.out else ""),
    )


def _bytes_per_token(model, part, windows) -> float | None:
    """Of the tokens that are predicted in these windows; None for a model that reads with a tokenizer of its own."""
    from ..models.tiny import LanguageModel

    if not isinstance(model, LanguageModel):
        return None
    return part.tokenizer.lengths[windows[1::2, 1:]].double().mean().item()


def _predict(options) -> Answer:
    from .. import records
    from ..analysis import predict

    if options.gpu == "list":
        return Answer(names := [each["name"] for each in predict.datasheets()], "\n".join(names))
    rows = predict.predict(
        options.gpu,
        options.nnz,
        options.d_model,
        options.d_ff,
        gated=not options.plain,
        tokens=options.tokens,
        kind=options.workload,
    )
    columns = {"tokens": "tokens", "path": "path", "ms": "ms", "x_dense": "x dense"}
    columns |= {"read_mb": "MB of weights needed", "between_mb": "MB between"}
    lines = [records.table(rows, columns), "predict: from the vendor's figures and the shares that an H100 reaches"]
    for row in predict.errors():
        lines.append(
            f"predict: {row['layers']} layers recorded on an {row['gpu']} would be predicted as {row['least']:.2f} to "
            f"{row['most']:.2f} times what they took, {row['median']:.2f} in the middle"
        )
    return Answer(rows, "\n".join(lines))


def _record(options) -> Answer:
    from .. import records
    from ..core import folders
    from . import recordings

    names = sorted(recordings.RECORDINGS)
    if options.name is None:
        return Answer(strict_json(names), "\n".join(names))
    if options.name not in names:
        raise InputError(f"there is no recording {options.name!r:.200}; accepted: {', '.join(names)}")
    told = {name: value for name in ("seed", "seconds", "cases") if (value := getattr(options, name)) is not None}
    if refused := [name for name in told if options.name not in _TAKEN_BY[name]]:
        takers = _TAKEN_BY[refused[0]]
        accepted = f"with {' and '.join(takers)}, which {'do' if len(takers) > 1 else 'does'}"
        raise InputError(f"{options.name} takes no --{refused[0]}; accepted: {accepted}")
    where = options.out or folders.new_records_dir()
    check_folder(where)
    with _terminated_like_interrupted():  # what was measured is saved (recordings)
        record = recordings.RECORDINGS[options.name](**told)
    saved = f"record: saved {record.save(where)}"
    rows = records.flat_rows([record])
    return Answer(record.to_json(), f"{records.table(rows, ROW_COLUMNS)}\n{saved}" if rows else saved)


def _compile(options) -> Answer:
    import torch

    from ..cuda import cubins
    from ..cuda.prebuild import prebuild

    if unknown := sorted(set(options.arch) - set(cubins.ARCHITECTURES)):
        raise InputError(f"--arch is {', '.join(unknown)!r:.80}; accepted: {', '.join(cubins.ARCHITECTURES)}")
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
    from ..records.provenance import kernel_hashes

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
    table = records.table(rows, {"record": "record", **ROW_COLUMNS, "date": "date", "stale": "stale"})
    return Answer(rows, table if rows else "records: none in this folder yet; on a GPU, twell-lab record makes them")
