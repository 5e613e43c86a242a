"""Runs programs, the operations of a plan in their order, on a device and its queues: threads on a CPU, streams on
CUDA. It knows no model. Of `planner` it imports only `schedule`, `cpu`, `graph`, `optimizers` and the root."""
