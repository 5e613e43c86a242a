"""Defines chain, plan and program, computes the bytes and seconds that a program takes, and proves that it is right.
Imports `machine` and `optimizers`; needs neither torch nor a solver."""
