"""Tells about a job what nothing has trained yet: what it learns from, what would end it, and whether its numbers are
plain PyTorch's, with a stop and without. Each is a process; `python -m worker.check` starts them all."""
