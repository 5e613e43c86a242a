"""Trains a model under a program, with the numbers of plain PyTorch: slices, gradients, the items on the device and on
the host. Imports `runtime`, and of `planner` only `schedule`, `cpu`, `graph`, `measure`, `optimizers` and the root."""
