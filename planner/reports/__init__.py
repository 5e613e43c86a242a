"""Values that are shown to people: the receipt of a plan, the certificate of a comparison. Imports `schedule` and
`machine`, and no torch."""
