"""A small real language model behind vLLM's token-level completions, in numpy alone."""
