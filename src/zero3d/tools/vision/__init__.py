"""Vision-language models, type by type: a tiny model of each, and what becomes of it.

tiny    a tiny model of every type that AutoModelForImageTextToText builds, and micro-batches with images for it
"""
