"""The processes that live long: daemon, dispatcher, supervisor of broker and workers. Imports `api`, `jobs`, `trackers`
and `planner.run`."""
