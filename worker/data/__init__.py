"""Turns data files into batches of tokens. Imports `planner.job` only."""
