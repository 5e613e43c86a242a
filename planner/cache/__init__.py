"""Plans, measurements and receipts that are kept in the database. Imports `schedule` and `machine`."""
