"""Models: the decoder of the Llama family, a fallback through transformers, and their loaders."""
