"""The GPUs of this machine: what they are, hold and did."""
