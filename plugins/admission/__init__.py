"""Who may start."""
