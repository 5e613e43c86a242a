"""Describes machines as values: rates and budgets, graphics cards by name, the memory of this machine. Imports only
modules directly in `planner/`, and no torch."""
