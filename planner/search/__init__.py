"""From the solver's fractions to the fastest plan of whole tensors: `make_plan`. Imports `ilp`, `greedy`, `candidate`,
`schedule` and `machine`."""
