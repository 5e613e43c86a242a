"""Trains jobs under a plan. The root of this package holds what is started from outside: the trainer, the preparation
of data, the task of the GPU worker, and the Python interface (`api`)."""
