"""What `torchrun -m twell_lab train` does, several times in one group of processes: importing torch is most of the
time.

    torchrun ... tests/training/train/several.py DEVICE '[[["--steps=12", "--out=..."], 0], ...]'

Each run is given by its options and the exit status that it is to end with. With 130 the second process gets a Ctrl-C
at the fourth row of the history. Process N writes the names of the kernels that it launched into kernels-N.json in the
run's folder."""

import importlib
import json
import runpy
import signal
import sys
from pathlib import Path

from twell_lab.cuda import launch
from twell_lab.training.parallel import joined

trainer = importlib.import_module("twell_lab.training.loop")  # the module: the package's `train` is the function
real_row = trainer._row


def run(options, status, rank, names):
    names.clear()
    rows = []

    def row(*arguments):
        rows.append(real_row(*arguments))
        if status == 130 and rank == 1 and len(rows) == 4:
            signal.raise_signal(signal.SIGINT)
        return rows[-1]

    trainer._row = row
    sys.argv = ["twell-lab", "train", *options]
    try:
        runpy.run_module("twell_lab", run_name="__main__")
    except SystemExit as ended:
        assert (ended.code or 0) == status, (options, ended.code)


def main(device, asked):
    names, real = set(), launch.Call.__call__

    def called(call, *tensors):
        names.update(one.kernel.name for one in call._launches)
        return real(call, *tensors)

    launch.Call.__call__ = called
    with joined(device) as world:
        for options, status in asked:
            run(options, status, world.rank, names)
            out = Path(next(option for option in options if option.startswith("--out=")).removeprefix("--out="))
            if out.is_dir():
                (out / f"kernels-{world.rank}.json").write_text(json.dumps(sorted(names)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
