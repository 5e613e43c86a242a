"""Defines candidates for a plan: the problem that they solve, a schedule per tensor, and what a candidate costs.
Imports `schedule` and `machine`."""
