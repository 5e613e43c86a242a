"""A run's figures told to trackers (TensorBoard, wandb, trackio, mlflow), from metrics.jsonl and by processes of their
own: training never waits for them. Imports `jobs`, `planner.job` and `planner.run`."""
