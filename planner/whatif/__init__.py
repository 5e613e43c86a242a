"""Answers the same question with something changed: another batch size, what would fit, what would help. Imports
`search`, `measure`, `reports` and what they import."""
