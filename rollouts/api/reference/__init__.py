"""The HTTP surface of ProRL Agent's first server, so that its trainers work unchanged."""
