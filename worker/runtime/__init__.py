"""A device and its queues: threads on a CPU, streams on CUDA. Knows no model and imports `planner.schedule` and
`planner.cpu` only."""
