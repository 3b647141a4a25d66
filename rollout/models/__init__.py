"""Model architectures, one file each, and how their weights are found and loaded."""
