"""A machine as a value: rates and budgets, cards by name, the memory of this one. Imports the package's root only, and
no torch."""
