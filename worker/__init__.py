"""Training under a plan. The root holds what is started: the trainer, the preparation of data, RQ's task, and the
Python interface (`api`)."""
