"""What was given cannot be; everything else that is raised in ``sim`` is a bug of its own."""


class SpecError(ValueError):
    """A tier, model config, capacity, workload or request no server could have: what, and why."""
