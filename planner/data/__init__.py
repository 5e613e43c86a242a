"""The files of a dataset: where they are, their records, and the one reader of them."""
