"""Orders of the waiting queue."""
