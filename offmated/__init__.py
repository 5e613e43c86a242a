"""The service around planner and worker: queue, daemon, command line. The root of this package holds what each of its
folders may import: paths, settings, the lock, the log of repeated errors."""
