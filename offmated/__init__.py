"""The service around planner and worker: queue, daemon, command line. The root holds what every folder may import:
paths, settings, the lock, the log of repeated errors."""
