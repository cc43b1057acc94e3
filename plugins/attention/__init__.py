"""Attention backends: kernels behind one interface, their capabilities checked at start."""
