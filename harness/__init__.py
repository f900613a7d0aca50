"""What did happen: plans, sessions, journals, verdicts and reports. One folder a wing; see ARCHITECTURE.md."""
