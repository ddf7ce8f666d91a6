"""Images on a node: pulled, built, unpacked, kept and evicted. Pure Python, no Django."""
