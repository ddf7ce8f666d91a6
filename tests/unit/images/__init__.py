"""Images without an engine: references, keys, templates, definitions."""
