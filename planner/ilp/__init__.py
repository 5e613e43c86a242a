"""The integer program over sums of tensors (O-ILP) and the lower bound of a step. Imports `candidate`, `schedule` and
`machine`; the solver's variables never leave this folder."""
