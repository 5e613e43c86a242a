"""Candidates before they are plans: what is asked, a decision per tensor, and what a candidate costs. Imports
`schedule` and `machine`."""
