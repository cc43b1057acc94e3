"""Which rows a step runs."""
