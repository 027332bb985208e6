"""Vision-language models, type by type: a tiny model of each, and what becomes of it.

tiny    a tiny model of every type that AutoModelForImageTextToText builds, and micro-batches with images for it
trial   one type on two ranks at stage 3, of which one has no image, beside plain PyTorch
table   what became of all types, as this package carries it
"""
