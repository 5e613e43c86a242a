"""Holds what daemon, planner and trainer share about a run: its folder, processes and step times. Imports only the
package's root, and no torch."""
