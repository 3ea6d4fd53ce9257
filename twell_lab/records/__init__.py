"""Recorded measurements, what ran for them, and whether that is still what is here. May import ops and all below."""
