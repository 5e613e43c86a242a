"""The daemon's HTTP interface on its socket, and what it shows. Imports `jobs` and `planner.run`."""
