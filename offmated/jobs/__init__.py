"""Everything about jobs: their table, their states and transitions, submission, migrations. Imports the package's
root and `planner.job`, `planner.run`, `planner.machine`."""
