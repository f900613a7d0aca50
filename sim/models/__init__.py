"""What a model's config.json says, read as vLLM reads it: on the standard library alone."""
