"""Hugging Face models: finding their blocks, writing their folders."""
