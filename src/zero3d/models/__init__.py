"""Hugging Face and plain models: found blocks, built without weights, loaded by slices, chains for pipelines."""
