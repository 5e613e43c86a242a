"""Turns a job and a machine into a plan, which is checked before it runs. The modules directly in this folder are those
that every subfolder may import: errors, units, JSON and checks. `__main__` and `tasks` are started, never imported."""
