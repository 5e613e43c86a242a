"""The base of offmate: jobs, errors, units; chains, machines, plans, programs; graphs of blocks; the solvers."""
