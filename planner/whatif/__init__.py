"""The same question with something changed: another batch, what would fit, what would help. Imports `search`,
`measure`, `reports` and what they import."""
