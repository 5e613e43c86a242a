"""The job file and its data: read and checked before anything runs. Imports the package's root and `machine`, but not
torch, because the command line uses it."""
