"""The CPU's AdamW: what the worker updates with, and the planner measures."""
