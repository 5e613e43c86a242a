"""A run: the loop of steps, evaluation, metrics, when to stop. Imports `engine`, `data` and `storage`."""
