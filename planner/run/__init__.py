"""Holds what daemon, planner and trainer share about a run: its folder, processes and step times. Imports only modules
directly in `planner/`, and no torch."""
