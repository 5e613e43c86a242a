"""Measures a Hugging Face model and this machine, and describes them for the planner as a `Chain` and a `Hardware`.
Imports `graph`, `cpu`, `job`, `schedule` and `machine`."""
