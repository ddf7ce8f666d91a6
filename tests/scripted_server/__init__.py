"""Play given assistant texts over the token-level HTTP of real servers. No model is in here."""
