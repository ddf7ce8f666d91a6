"""Servers in the shape of others, and servers that misbehave."""
