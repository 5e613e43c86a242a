"""Uses the CPU as optimizer (AdamW in C, equal to PyTorch's bit for bit) and as device (a meter of its bytes). Imports
only modules in the root of `planner`."""
