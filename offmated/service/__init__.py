"""Long-lived processes: the daemon with its dispatcher, the supervisor of broker and workers. Imports `api`, `jobs`,
`trackers` and `planner.run`."""
