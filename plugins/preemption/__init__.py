"""Who gives way when memory is short."""
