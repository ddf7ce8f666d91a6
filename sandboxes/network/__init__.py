"""What serves the sockets that listen inside a sandbox's own network; no Django here."""
