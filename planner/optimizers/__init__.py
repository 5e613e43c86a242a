"""Kinds of optimizers, one file each: what a kind keeps for a tensor, what its updates need, and the updates."""
