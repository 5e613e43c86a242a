"""The integer program over sums of tensors (O-ILP) and the lower bound of a step. Imports `draft`, `schedule` and
`machine`; the solver's variables never leave this folder."""
