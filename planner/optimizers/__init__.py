"""Kinds of optimizers, one file each: what one keeps for a tensor, what its updates take, and the updates."""
