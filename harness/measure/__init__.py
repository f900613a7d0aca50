"""One session: servers up, requests out, counters settled, rows journalled."""
