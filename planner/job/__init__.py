"""The job file and its data, read and checked before anything runs. Imports the package's root and `machine`, and no
torch, as the command line uses it."""
