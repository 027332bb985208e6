"""Which part of a tensor a rank holds.

boxes   flat ranges as n-dimensional boxes of a tensor (no torch)
cuts    how the tp axis divides a parameter: shapes, values and boxes
"""
