"""What is asked: plans, their files and checks, and everything decided before a run."""
