"""Draws a plan as an HTML page and as a timeline. Imports `reports`, `schedule` and `machine`."""
