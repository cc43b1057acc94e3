"""A paper's figures, drawn from run folders."""
