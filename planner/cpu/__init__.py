"""Uses the CPU as optimizer (AdamW in C, bit for bit PyTorch's) and as device (a meter of its bytes). Imports only the
root of the package."""
