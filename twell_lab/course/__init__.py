"""What the notebooks are made of: measurements, figures, widgets, exercises. The rest of the library never imports it.

measure, training, packing      what notebooks 00 and 01, 02, and 03 compute: data in, data out, nothing drawn
kernels                         the same for 04: workloads, altered kernels, recorded and predicted times
plots_*, widgets_*              the figures and the interactive figures of each, in the style of `twell_lab.plots`
exercises                       the instant checks under the exercises
notebook                        what the first cell of every notebook does
"""
