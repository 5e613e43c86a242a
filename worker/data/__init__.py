"""From files to batches of tokens. Imports `planner.job` only."""
