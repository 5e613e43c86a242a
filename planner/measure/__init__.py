"""From a Hugging Face model and this machine to a chain and a hardware. Imports `graph`, `cpu`, `job`, `schedule` and
`machine`."""
