"""The truth about jobs: the table, the states and the ways between them, submission, migrations. Imports the package's
root and `planner.job`, `planner.run`, `planner.machine`."""
