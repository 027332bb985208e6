"""Ranks and what they say to each other: mesh, axes, collectives, the ledger of traffic, agreement on errors."""
