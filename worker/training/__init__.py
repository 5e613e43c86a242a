"""Runs a training: the loop of steps, evaluation, metrics, stopping. Imports `engine`, `data` and `storage`."""
