"""The daemon's HTTP interface and the views of jobs that it shows. Imports `jobs` and `planner.run`."""
