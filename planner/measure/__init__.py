"""Turns a Hugging Face model and this machine into a chain and a hardware. Imports `graph`, `cpu`, `job`, `schedule`
and `machine`."""
