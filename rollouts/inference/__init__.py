"""Talk to inference servers in token ids: rendering, routing, retries and the trace."""
