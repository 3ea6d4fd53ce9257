"""The ways through a feed-forward layer. PATHS has each by the name that plans, records and the operator know it by. A
new one is a file here and a line below; or a file of a room above, which hands it down (`Registry.further`)."""

from importlib import import_module

from .path import Dense, Path
from .twell import HotCold, Twell

_HANDS_DOWN = "twell_lab.sparsities"  # fills `further`; imported when a name is asked for that is not here


class Registry(dict[str, Path]):
    """Holds paths by name. Those in it are exact, and weighed for every plan. Others are found by their names as well,
    and are weighed where somebody named them.

    further: of these, the name, and module and class, which is imported when it is first used."""

    def __init__(self, *paths: Path) -> None:
        super().__init__({path.name: path for path in paths})
        self.further: dict[str, str] = {}
        self._found: dict[str, Path] = {}

    def names(self) -> list[str]:
        """Return the names of all paths, those of this room first."""
        import_module(_HANDS_DOWN)
        return [*self, *self.further]

    def __missing__(self, name: str) -> Path:
        if name not in self._found:
            if name not in self.names():
                raise KeyError(name)
            module, _, kind = self.further[name].rpartition(".")
            self._found[name] = getattr(import_module(module), kind)()
        return self._found[name]


PATHS = Registry(Dense(), Twell(), HotCold())
