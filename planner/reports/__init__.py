"""Defines values that are shown to people: the receipt of a plan, the certificate of a comparison with plain PyTorch.
Imports `schedule` and `machine`, and no torch."""
