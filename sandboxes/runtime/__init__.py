"""Sandboxes as plain Python: start, enter, freeze and end them, with no Django."""
