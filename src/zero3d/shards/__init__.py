"""Which part of a tensor a rank holds: boxes of flat ranges, cuts over the tp axis. No torch where boxes are enough."""
