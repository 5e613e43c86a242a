"""Sends a run's figures to trackers (TensorBoard, wandb, trackio, mlflow). They are read from metrics.jsonl by separate
processes, so training never waits for a tracker. Imports `jobs`, `planner.job` and `planner.run`."""
