"""A configuration becomes an engine and data."""
