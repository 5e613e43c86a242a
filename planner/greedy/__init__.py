"""Candidate plans that need no solver, among them the one with the least GPU memory. Imports `candidate`, `schedule`
and `machine`."""
