"""The capstone: a kernel of the reader's own, judged, counted, predicted and timed."""
