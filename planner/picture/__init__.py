"""Draws a plan as a page and as a trace. Imports `reports`, `schedule` and `machine`."""
