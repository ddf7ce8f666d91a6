"""The command line, `prorl`."""
