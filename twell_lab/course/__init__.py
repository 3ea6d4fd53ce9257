"""What the notebooks are made of, one folder a subject: data (computed or read), figures (drawn from it), widget
(moved).

Shared: notebook (what a first cell does), exercises, recorded, drawing, widgets. Nothing else in the library uses any.
"""
