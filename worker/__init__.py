"""Trains under a plan. The root folder holds what is started: the trainer, the preparation of data, RQ's task, and the
Python interface (`api`)."""
