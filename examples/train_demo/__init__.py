"""The training demonstration: a real policy gradient over the HTTP API, whose reward rises."""
