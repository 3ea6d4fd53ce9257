"""The `twell-lab` command: the table of its subcommands, and what errors and interruptions become. Each subcommand
imports what it needs when it runs, so that `--help` is quick.

Exit status: 0 done; 1 a check failed; 2 a mistake in the input or the set-up, which one line on stderr names;
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..core import InputError, TwellError
from . import terminal
from .options import Option, add_fields, option, path

MODEL = "bench model"  # two words, one command


class Command:
    """A subcommand: "module:function" of this package, which is given the parsed options and returns an Answer; what
    it does; its options; a dataclass whose fields are options too, as "module:name"; what stands below its help."""

    def __init__(self, run: str, text: str, *options: Option, fields: str | None = None, epilog: str | None = None):
        self.run, self.text, self.options, self.fields, self.epilog = run, text, options, fields, epilog


# ---- options that several commands have ----

_SAVED = "a folder that twell-lab train --out wrote, or one of transformers, or a repository of the Hub"
_TEXT = option(
    "--text",
    "PATH",
    "a file or folder, read whole; of the text that the model was trained on, only the held-out part "
    "[the held-out part of the source of Python's standard library]",
)
_DTYPES, _WORKLOADS = ["bfloat16", "float16", "float32"], ["lognormal", "uniform"]
_DEVICE = option("--device", "DEVICE", "cpu, cuda, cuda:1 [a GPU where there is one]")
_OWN = f"{', '.join(_DTYPES)} [bfloat16 on a GPU, float16 on one older than sm_80, else float32]"
_DTYPE = option("--dtype", "DTYPE", _OWN, choices=_DTYPES)
_PATHS = "twell, hot_cold, two_four, blocks, or lossy: int8, fp8, twell_int8, predicted, experts"
_LAYER = (
    option("--d-model", "N", "the layer's width", 2048),
    option("--d-ff", "N", "its neurons", 5632),
    option("--nnz", "X", "mean number of neurons firing for a token", 29.0, type=float),
    option("--workload", "", "a few neurons fire far more often, or all alike", "lognormal", choices=_WORKLOADS),
)
_PLANNING = (
    option("--tokens", "N", "tokens at once to plan for", [1, 64, 2048, 16384]),
    option("--predict-only", None, "time none of the candidates"),
    option("--calls", "", "how the model will be called", "eager", choices=["eager", "compiled", "captured"]),
    option("--paths", "PATH", f"what to weigh beside dense: {_PATHS} [twell hot_cold]", nargs="+", type=str),
    _DEVICE,
    _DTYPE,
)
_PLANNED = "how many windows to profile, and how many others to time on"
_PLAN = option("--plan", "FILE", "a plan that twell-lab plan --out wrote [a new one]")
_KEEP = option("--out", "FOLDER", "save what was measured here")


def _model(windows: str, also: str = "") -> tuple[Option, ...]:
    """Return the options for a model and a text. windows: what --windows counts; also: what else MODEL may be."""
    return option("model", "MODEL", _SAVED + also), _TEXT, option("--windows", "N", windows, 256)


_TRAINING = """\
examples:

  twell-lab train --text my-texts --l1 1e-3 --out build/mine
  twell-lab train --resume build/mine
  twell-lab train --from build/mine --text other-texts --out build/further
  twell-lab prepare "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" \\
    --tokenizer bpe:32768 --out texts/edu
  torchrun --nproc-per-node 2 -m twell_lab train --config 0.5B \\
    --text texts/edu --dtype bfloat16 --compile --out build/edu

Ctrl-C, SIGTERM and every five minutes save the run; about a tenth of the text
is held out for validation; metrics.jsonl in --out has a line for every
--log-every steps. --from takes a model of this project, or a Llama with ReLU of
transformers. On a GPU, --dtype bfloat16 --compile is several times faster."""

COMMANDS: dict[str, Command] = {
    "doctor": Command("doctor:doctor", "Say what this machine has, what will run where, and what is missing."),
    "tour": Command(
        "commands:tour",
        "Train with and without L1, profile, pack, time, and write a page.",
        option("--text", "PATH", "a file or folder to train on [the source of Python's standard library]"),
        option("--out", "FOLDER", "where index.html and tour.json go", Path("build/tour")),
        option("--quick", None, "a few steps and small layers, to see that all works; its figures say nothing"),
        option("--render", "TOUR_JSON", "only draw the page of an earlier tour, of any machine", type=path),
    ),
    "train": Command(
        "commands:train",
        "Train a small ReLU language model, with an L1 penalty if asked for.",
        option("--out", "DIR", "a new folder, for metrics, a checkpoint for --resume and, at the end, the model"),
        option("--resume", "DIR", "go on with the run saved there; --steps, where and how it computes may change"),
        option("--config", "NAME", "what to start from: 1M to 2B, 'list' shows them; or a file of YAML or JSON"),
        fields=".training.config:TrainConfig",
        epilog=_TRAINING,
    ),
    "prepare": Command(
        "commands:prepare",
        "Read a text of any length once, encode it, and keep its tokens for training.",
        option("text", "PATH", "a file, a folder of files, or hf:owner/name?bytes=10e9, that much of a dataset"),
        option("--out", "DIR", "a new folder, for twell-lab train --text", required=True),
        option("--tokenizer", "WORD", "bytes, bpe:4096 (a BPE of that size, trained here), or a file [bytes]"),
    ),
    "sample": Command(
        "speak_commands:sample",
        "Let a saved model continue a text, and time it.",
        option("model", "MODEL", _SAVED),
        option("--prompt", "TEXT", "what the model continues [a new line]", "\n"),
        option("--tokens", "N", "how many to add, unless a model of transformers ends its text before", 200),
        option("--temperature", "X", "0 takes the most likely token; above, tokens are drawn [0]", 0.0),
        option("--top-k", "N", "draw from the N most likely tokens alone"),
        option("--seed", "SEED", "of the draw [another one each time]"),
        option("--sparse", None, "plan the layers on this text, swap them, and compare with the dense model"),
        _DEVICE,
    ),
    "profile": Command(
        "model_commands:profile",
        "Count which neurons of a saved model fire on a text.",
        *_model("how many windows", "; or a profile that --out saved"),
        option("--out", "OUT", "save the counts here, as JSON"),
        option("--against", "FILE", "compare with the profile that --out saved here"),
        option("--html", "OUT", "draw it into a page that needs no network"),
        option("--plot", "OUT", "draw its layers into a picture: .png, .svg or .pdf; needs kaleido"),
    ),
    "plan": Command(
        "model_commands:plan",
        "Choose a path for every layer of a saved model: dense, TwELL or hot/cold, or what --paths names.",
        *_model(_PLANNED),
        option("--out", "OUT", "save the plan here, as JSON"),
        *_PLANNING,
        option("--all", None, "print every candidate, not only what was chosen"),
    ),
    "thresholds": Command(
        "model_commands:thresholds",
        "Choose what a model that was not trained to be sparse may set to zero: lossy.",
        *_model("how many windows to calibrate on, and how many others to measure the loss on"),
        option("--out", "OUT", "save the thresholds here, as JSON"),
        option("--sparsity", "X", "the share of values to set to zero", 0.5),
        option("--method", "", "behind the gate, or at projections' inputs", "cats", choices=["cats", "teal", "wina"]),
    ),
    "predict": Command(
        "model_commands:predict",
        "Say what a layer should take on a GPU that you do not have.",
        option("gpu", "GPU", 'a GPU of data/gpus.json, such as "RTX 4090"; "list" names all'),
        option("--tokens", "N", "tokens at once", [1, 16, 256, 2048, 16384]),
        *_LAYER,
        option("--no-gated", None, "a plain layer, without a gate", action="store_false", dest="gated"),
    ),
    "sparsify": Command(
        "model_commands:sparsify",
        "Save a model with a plan of its layers beside it.",
        *_model(_PLANNED),
        option("--out", "FOLDER", "a folder without a model", required=True),
        _PLAN,
        option("--relufy", None, "put ReLUs in the place of SiLU, GELU and the like; then train it further"),
        *_PLANNING,
    ),
    "export": Command(
        "speak_commands:export",
        "Write a saved model as a LlamaForCausalLM that others read.",
        option("model", "DIR", "a folder that twell-lab train --out wrote"),
        option("--out", "DIR", "a folder without a model", required=True),
    ),
    "bench": Command(
        "bench_command:layer",
        "Check and time a sparse feed-forward layer against torch's dense one.",
        option("--tokens", "N", "tokens at once", [1, 8, 64]),
        *_LAYER,
        option("--compiled", None, "time torch.compile's dense layer too"),
        option("--seconds", "S", "how long to measure each size on a CPU", 2.0),
        _KEEP,
        _DEVICE,
        (_DTYPE[0], _DTYPE[1] | {"nargs": "+"}),
        epilog=f"twell-lab {MODEL} times a whole model: twell-lab {MODEL} --help",
    ),
    MODEL: Command(
        "bench_command:whole_model",
        "Check and time a whole model, dense beside sparse.",
        option("model", "PATH", f"{_SAVED}; or a size, 1M to 2B: a drawn Llama"),
        option("--tokens", "N", "of each forward, up to the model's context or a multiple of it [2048]", nargs="+"),
        option("--batches", "N", "of the steps of decoding; none after it: no decoding", [1, 8, 64], nargs="*"),
        option("--text", "PATH", "what a saved model reads [as of twell-lab profile]; a size reads random tokens"),
        option("--firing", "FILE", "of a size: a saved profile, as which its neurons fire [0.5%% for a token]"),
        _PLAN,
        option("--paths", "PATH", f"time it on each of these too: {_PATHS}, with error and loss [none]", [], type=str),
        option("--compiled", None, "time both models under torch.compile too"),
        option("--graphs", None, "on a GPU, time forwards as CUDA graphs too"),
        option("--training", None, "time a training step too"),
        option("--seconds", "S", "how long to measure each row on a CPU; on a GPU its energy [1; 3]"),
        _KEEP,
        _DEVICE,
        _DTYPE,
    ),
    "course": Command(
        "commands:course",
        "Write the course's notebooks, to be filled in, into a folder and open JupyterLab there.",
        option(
            "folder", "DIR", "where; notebooks that are there stay as they are", Path("twell-lab-course"), nargs="?"
        ),
        option("--no-open", None, "only write them", action="store_false", dest="open"),
        option("--alone", None, "links lead to the repository, for notebooks that are opened one by one"),
    ),
    "submit": Command(
        "commands:submit",
        "Judge a kernel of the capstone, which runs here as any program does, and write a record of its medal.",
        option("file", "FILE", "a CUDA source with the kernel down"),
        option("--out", "FOLDER", "save the record here [this folder]", Path()),
    ),
    "grade": Command(
        "commands:grade",
        "Say which exercises were solved in each of some folders, one a reader's.",
        option("folders", "DIR", "in which a reader worked on the notebooks; the row has its name", nargs="+"),
    ),
    "record": Command(
        "commands:record",
        "Make one of the recordings that the course's figures come from.",
        option("name", "NAME", "without a name, the names are listed", nargs="?"),
        option("--out", "FOLDER", "where the record goes [data/records of a checkout, else the working folder]"),
        option("--seed", "SEED", "for attack only: draw other cases"),
        option("--seconds", "S", "for attack, and recordings of large tables: how long at most"),
        option("--rivals", "FOLDER", "for arena only: files NAME.py with what is timed beside; these are run"),
    ),
    "compile": Command(
        "commands:compile_kernels",
        "Compile the kernels for machines that have no compiler.",
        option("out", "DIR", "a folder; TWELL_LAB_CUBINS names it on those machines"),
        option("--arch", "ARCH", "of the GPUs, sm_75 to sm_120", ["sm_90"]),
        option("--dtype", "DTYPE", f"{', '.join(_DTYPES)} [bfloat16]", ["bfloat16"], choices=_DTYPES),
        option("--d-model", "N", "model widths", [2048]),
    ),
    "records": Command(
        "commands:list_records",
        "List the records that there are, or the rows of one kind.",
        option("kind", "KIND", "list the rows of these", nargs="?"),
        option("--folder", "DIR", "another folder than data/records"),
        option("--verify", None, "only check that each kernel was tested on a GPU, or is named as untested"),
    ),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors begin as all others do."""

    def error(self, message: str) -> NoReturn:
        print(f"twell-lab: {message}; {self.prog} --help says more", file=sys.stderr)
        raise SystemExit(2)


def _parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line. It knows the fields that are options only where `arguments` ask for their
    command, because the import of their class may need torch."""
    text = "How activation sparsity in a language model becomes real GPU speed."
    parser = _Parser(prog="twell-lab", description=text)
    parser.add_argument("--version", action="version", version=f"twell-lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        what = command.text[0].lower() + command.text[1:].rstrip(".")
        added = commands.add_parser(name, help=what, description=command.text, epilog=command.epilog)
        if command.epilog:
            added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
        if command.fields and name in arguments:
            add_fields(added, _named(command.fields))
        for option_name, how in command.options:
            added.add_argument(option_name, **how)
    return parser


def _named(place: str) -> Any:
    """Return what "module:name" names, of a module of this package."""
    module, _, name = place.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
        # Before torch is loaded: its threads sleep while they wait in a tour, which is to time alike everywhere, and in
        # a training on a busy machine, where one that spins takes the core from the one that it waits for.
        busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does: what was measured is saved
        if arguments[:1] == ["tour"] or arguments[:1] == ["train"] and busy:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    rank = os.environ.get("RANK", "0")
    try:
        terminal.set_up()
        return _run(arguments)
    except KeyboardInterrupt as error:
        why, status = f"\ntwell-lab: {_how_to_go_on(error)}", 130
        if rank != "0":  # under torchrun one process reports it for all
            return status
    except TwellError as error:  # there each process reports its own
        why, status = f"twell-lab{'' if rank == '0' else f', process {rank}'}: {error}", 2
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError with one of these wordings where it cannot allocate memory on the CPU.
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate|alloc_cpu", str(error)):
            raise
        why, status = "twell-lab: this does not fit into memory; smaller sizes are accepted", 2
    except OSError as error:  # an error of a file or device that is handled nowhere else
        if error.errno is None:
            raise
        what = "the system says" if error.filename is None else repr(error.filename)
        why, status = f"twell-lab: {what}: {error.strerror}", 2
    print(why, file=sys.stderr)
    return status


def _run(arguments: list[str]) -> int:
    """Do what these arguments ask for and write the output. Returns the exit status."""
    if arguments[:1] == ["bench"] and not (arguments[1:] or ["-"])[0].startswith("-"):
        arguments = [MODEL, *arguments[1 + (arguments[1] == "model") :]]
    parser = _parser(arguments)
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stopped:
        if not stopped.code:  # after --help or --version, whose output argparse may have lost
            terminal.write("")
        raise
    command = COMMANDS[options.command]
    named = Counter(os.path.abspath(value) for value in vars(options).values() if isinstance(value, Path))
    files = [name.lstrip("-") for name, how in command.options if how.get("metavar") == "OUT"]
    written = [place for name in files if (place := getattr(options, name)) is not None]
    if twice := [place for place in written if named[os.path.abspath(place)] > 1]:
        raise InputError(f"{twice[0]} is named twice; accepted: a file of its own for what is written")
    answer = _named(command.run)(options)
    if answer is None:  # another process of torchrun's gives it
        return 0
    lines = [answer.text, *(f"{options.command}: saved {place}" for place in written)]
    answer._replace(text="\n".join(lines)).say(options.json)
    return answer.status


def _how_to_go_on(error: BaseException) -> str:
    """Return what was interrupted and, of a training that was saved, the command line that goes on with it."""
    folder = getattr(error, "folder", None)  # of checkpoint.Interrupted
    if folder is None:
        return "interrupted"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return f"{error}; to go on: torchrun as before, with --resume {shlex.quote(folder)}"
    started = [sys.argv[0]] if Path(sys.argv[0]).name.startswith("twell-lab") else ["python", "-m", "twell_lab"]
    return f"{error}; to go on: {shlex.join([*started, 'train', '--resume', folder])}"
