"""The asynchronous client; `prorl_client._sync` is generated from it."""
