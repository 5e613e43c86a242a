"""Candidates that need no solver, among them the most frugal plan. Imports `candidate`, `schedule` and `machine`."""
