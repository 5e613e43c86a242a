"""Compares a job's first steps under its plan with the same steps in plain PyTorch. Imports the whole worker, and the
planner to plan the job."""
