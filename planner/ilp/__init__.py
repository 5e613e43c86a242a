"""The integer program over sums of tensors (O-ILP), and a lower bound on the step. Imports `candidate`, `schedule` and
`machine`; the solver's variables never leave this folder."""
