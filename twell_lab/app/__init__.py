"""What people start: the command line, the tour and its page, the doctor, the recordings. No room imports this."""
