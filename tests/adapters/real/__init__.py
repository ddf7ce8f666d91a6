"""Contracts against the trainers' own packages; each test is skipped where its package is not."""
