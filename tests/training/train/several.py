"""What `torchrun -m twell_lab train` does, several times in one group of processes: importing torch is most of the
time.

    torchrun ... tests/training/train/several.py DEVICE '[[["--steps=12", "--out=..."], 0], ...]'

Each run is given by its options and the exit status that it is to end with. With 130 it is interrupted, as if Ctrl-C
came before the fourth row of its history. Process N writes the names of the kernels that it launched into
kernels-N.json in the run's folder."""

import importlib
import json
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

from twell_lab.cuda import launch
from twell_lab.training.parallel import joined

trainer = importlib.import_module("twell_lab.training.loop")  # the module: the package's `train` is the function
stopping = trainer.stopping


class Signals:
    """Signals of which one has come at the fourth row, where the processes ask for the fourth time."""

    asked = 0

    def __bool__(self):
        self.asked += 1
        return self.asked >= 4


def run(options, status, names):
    names.clear()
    trainer.stopping = (lambda *_: nullcontext(Signals())) if status == 130 else stopping
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
            run(options, status, names)
            out = Path(next(each for each in options if each.startswith("--out=")).removeprefix("--out="))
            if out.is_dir():
                (out / f"kernels-{world.rank}.json").write_text(json.dumps(sorted(names)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
