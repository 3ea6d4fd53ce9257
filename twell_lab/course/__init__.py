"""What the notebooks import: a folder for each subject, with its data (computed or read), figures and widget.

Several subjects share notebook (for a notebook's first cell), exercises, recorded, drawing and widgets. Only the
notebooks use this room, `twell-lab submit`, which judges as the capstone does, and the site and the tour's page, which
show the widget of notebook 00.
"""
