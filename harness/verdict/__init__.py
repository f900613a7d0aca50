"""After a run: reconciliation, findings, statistics, decision and the published results."""
