"""Turns a job and a machine into a plan, which is checked before it runs. The root holds what every folder may import:
errors, units, JSON and checks. `__main__` and `tasks` are started, never imported."""
