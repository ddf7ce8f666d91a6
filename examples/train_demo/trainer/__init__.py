"""The trainer: PyTorch, and the service's HTTP API; nothing of the service is imported."""
