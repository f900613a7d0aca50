"""What did happen: plan, sessions, journals, reconciliation and the terminal report."""
