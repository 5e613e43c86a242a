"""Keeps plans, measurements and receipts in the database. Imports `schedule` and `machine`."""
