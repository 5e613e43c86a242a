"""Builds and solves the integer program for a plan (O-ILP, in sums over tensors), and computes a lower bound on the
time of a step. Imports `candidate`, `schedule` and `machine`. The solver's variables never leave this folder."""
