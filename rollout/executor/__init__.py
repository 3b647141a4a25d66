"""Where workers run."""
