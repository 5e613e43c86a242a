"""What a run writes to disk: checkpoints, shards, the model folder. Imports `planner.job` and `planner.schedule`."""
