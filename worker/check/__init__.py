"""Checks of a job: what it learns from, what would end it, whether its numbers are those of plain PyTorch, and whether
a stop changes them. `python -m worker.check` does each in a process of its own."""
