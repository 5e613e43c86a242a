"""Candidates before they become plans: the problem they answer, a schedule per tensor, and what a candidate costs.
Imports `schedule` and `machine`."""
