"""Random models and settings, each from a number, trained under a plan and in a plain loop beside it.

`python -m tests.support.fuzz --from 1000 --seeds 50` tries fifty, with a line for each that is not plain PyTorch's.
"""
