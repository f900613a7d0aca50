"""What people and tools read: the HTML report, charts, tables, comparisons, exports."""
