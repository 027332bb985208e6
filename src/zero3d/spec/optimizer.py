"""The optimizers that a file names. No torch."""

NAMES = ADAMW, MUON, EIGHT_BIT = ("adamw", "muon", "adamw8bit")
