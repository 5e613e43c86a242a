"""The files of a dataset: where they are, and the one reader of their records."""
