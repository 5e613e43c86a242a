"""From the integer program's fractions of tensors to the fastest plan of whole tensors: `make_plan`. Imports `ilp`,
`greedy`, `candidate`, `schedule` and `machine`."""
