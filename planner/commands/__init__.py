"""Holds the commands of the planner's process: plan a job, ask about a machine, solve from files, list plans. Imports
every folder of the planner; only `planner/__main__.py` and `worker/check` import it."""
