"""A model trained under a program, with the numbers of plain PyTorch: slices, gradients, what is on the device and
what on the host. Imports `runtime` and the planner's `schedule`, `cpu`, `graph` and `measure`."""
