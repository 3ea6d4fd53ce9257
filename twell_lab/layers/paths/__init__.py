"""The ways through a feed-forward layer. All compute the same function; PATHS has each by the name that plans, records
and the operator know it by. A new one is a file here and a line below."""

from .dense import Dense
from .hot_cold import HotCold
from .path import Path
from .twell import Twell

PATHS: dict[str, Path] = {path.name: path for path in (Dense(), Twell(), HotCold())}
