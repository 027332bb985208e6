"""The old name of `zero3d.tools.cli`, for one release."""
