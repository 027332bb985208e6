"""Old names of `zero3d.ways`, for one release."""
