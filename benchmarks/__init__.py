"""Measurements side by side: each prints a table and, as its last line, one JSON document."""
