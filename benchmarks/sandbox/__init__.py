"""Compare our sandboxes with other ways, all interleaved in one run."""
