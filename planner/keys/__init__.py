"""What each key of a job may hold, and the checks of keys that belong together."""
