"""Builds the model that a job trains: its config, tokenizer, adapters, quantized weights and loss."""
