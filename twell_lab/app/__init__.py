"""What people start: the command line, the tour and its page, doctor, the recordings. Nothing imports this."""
