"""The demonstration: the whole line with a real small model, and a trainer that leases a batch."""
