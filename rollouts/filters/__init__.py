"""Rules that keep finished groups from the trainer: pure, registered by name."""
