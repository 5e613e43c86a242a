"""A job's first steps under its plan and in plain PyTorch, compared. Imports the whole worker, and the planner to plan
the job."""
