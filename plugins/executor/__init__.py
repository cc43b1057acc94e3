"""Executors: who computes a launch (a device, a script)."""
