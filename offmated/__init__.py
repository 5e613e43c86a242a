"""The daemon and its face: CLI, API, jobs, store, broker, dispatcher."""
