"""TTFT from a token split: the model, its fit and the break-even."""
