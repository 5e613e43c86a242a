"""Describes machines as values: rates and budgets, cards by name, the memory of this machine. Imports the package's
root only, and no torch."""
