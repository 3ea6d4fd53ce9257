"""The workshop "your own model": read one, look it over, and say from the numbers what to do with it."""

from . import figures
from .data import Own, gains, go_on, logits, read, some_text, windows
