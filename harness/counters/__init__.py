"""What the servers' pages say of one request."""
