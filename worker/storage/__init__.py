"""Stores what a run keeps on disk: checkpoints, optimizer states, activations, trained weights, the model folder.
Imports `planner.job` and `planner.schedule`."""
