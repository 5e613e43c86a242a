"""The CPU as optimizer (AdamW in C, bit for bit PyTorch's) and as device (a meter of its bytes). Imports the package's
root only."""
