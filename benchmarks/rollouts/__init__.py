"""Measure what many rollouts cost one run worker process."""
