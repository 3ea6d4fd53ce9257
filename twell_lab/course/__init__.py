"""What the notebooks are made of, one folder a subject: data (computed or read), figures (drawn from it), widget (moved).

Shared by all: notebook (a first cell), exercises, widgets, drawing. The rest of the library never imports any of it.
"""
