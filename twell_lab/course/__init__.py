"""What the notebooks import: a folder or a file for each subject, with its data (computed or read), figures and widget.

Several subjects share notebook (for a notebook's first cell), charts, recorded and widgets. The checks of exercises
are made of what verdicts has. Only the notebooks use this room, `twell-lab submit`, which judges as the capstone does,
and the site and the tour's page, which show the widget of notebook 00."""
