"""Names the optimizers that a file may ask for. No torch."""

NAMES = ADAMW, MUON, EIGHT_BIT = ("adamw", "muon", "adamw8bit")
