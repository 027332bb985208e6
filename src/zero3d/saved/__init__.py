"""A checkpoint on disk, without torch: names of folders, the manifest as checked values, checksums and headers."""
