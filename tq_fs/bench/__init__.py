"""Measurements against the physical limit and against other libraries, on the same bytes."""
