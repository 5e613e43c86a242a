"""What daemon, planner and trainer share about one run: its folder, its processes, its step times. Imports the
package's root only, and no torch."""
