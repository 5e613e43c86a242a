"""From a job and a machine to a plan, checked before it runs. The root holds what every folder may import: errors,
units, JSON and checks; `__main__` and `tasks` are started, never imported."""
