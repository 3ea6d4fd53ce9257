"""Where the words of a pool are, for tests of the kernels that fill one."""

from torch import Tensor
from torch.nn.functional import pad

from twell_lab.formats import POOL_ROWS, POOL_WORDS, WORDS


def pool_used(packed: Tensor) -> Tensor:
    """How many of its 64 pool words each group of 16 rows uses in each tile, int64 [ceil(tokens / 16), tiles]."""
    late = (packed[..., 0].long() - (WORDS - 1)).clamp(min=0)
    late = pad(late, (0, 0, 0, -len(late) % POOL_ROWS))
    return late.view(-1, POOL_ROWS, late.shape[1]).sum(1).clamp(max=POOL_WORDS)
