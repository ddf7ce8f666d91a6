"""Real tokenizers of model families, out of packages that carry them."""
