"""Trains a model under a plan's program, with the numbers of plain PyTorch: runs micro-batches, adds up gradients, and
moves weights, states and activations between device, host and disk. Imports `runtime`, and of `planner` only
`schedule`, `cpu`, `graph`, `measure`, `optimizers` and the root."""
