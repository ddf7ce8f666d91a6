"""How fast a batch of large trajectories leaves the service, and what that costs its process."""
