"""Plans, progress displays, reports and tables for people."""
