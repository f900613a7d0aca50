"""Before a run: predicted splits, expected times, the cliff, described deployments."""
