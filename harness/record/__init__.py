"""What is on disk: rows, journals and the run folder."""
