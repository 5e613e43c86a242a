"""Candidates that need no solver, among them the most frugal plan. Imports `draft`, `schedule` and `machine`."""
