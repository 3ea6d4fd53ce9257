"""GPT-NeoX, Pythia and Persimmon; Falcon's layer has the same names, with projections of its own class."""

from .family import Family

FAMILIES = (Family("GPT-NeoX and Falcon", up="dense_h_to_4h", down="dense_4h_to_h", activation="act"),)
