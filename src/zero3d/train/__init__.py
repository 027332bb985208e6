"""Training on top of the engine: data, the embedded demo, and what it measured against the formulas."""
