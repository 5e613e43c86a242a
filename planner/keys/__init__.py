"""Which values each key of a job file may have, and the checks of keys that must fit together."""
