"""Sharded, atomic checkpoints that load on any mesh; Hugging Face exports."""
