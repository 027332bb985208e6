"""What a model and an engine need, found by running them without data."""
