"""Answers a planning question with something changed: another batch size, what would fit, what would be faster. Imports
`search`, `measure`, `reports` and what they import."""
