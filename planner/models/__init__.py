"""From a job to its model: configs, tokenizers, adapters, quantized bases, losses."""
