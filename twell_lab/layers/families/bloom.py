"""Bloom, whose layer drops out and adds the residual. Its activation is set in its code, not in its configuration."""

from .family import Family

FAMILIES = (
    Family("Bloom", up="dense_h_to_4h", down="dense_4h_to_h", activation="gelu_impl", inside=True, residual=True),
)
