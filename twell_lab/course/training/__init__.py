"""Notebook 04, trained live: small models with and without the L1 term, and which neurons still fire in them."""

from .data import SMALL, firing_share, held_out, some_text
