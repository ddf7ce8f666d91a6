"""Greet people."""
