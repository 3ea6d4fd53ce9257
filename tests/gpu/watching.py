"""Which kernels run."""

from twell_lab.cuda import batch, launcher


def watched_launches(monkeypatch) -> list[str]:
    """A list to which the name of each kernel is added when it is launched, alone or in a call that is replayed."""
    names, launch, run = [], launcher.Prepared.launch, batch.Batch.run

    def alone(prepared, *more):
        names.append(prepared.made.name)
        launch(prepared, *more)

    def replayed(launches, starts):
        names.extend(each.prepared.made.name for each in launches._launches)
        run(launches, starts)

    monkeypatch.setattr(launcher.Prepared, "launch", alone)
    monkeypatch.setattr(batch.Batch, "run", replayed)
    return names
