"""Sinks: what becomes of the records of a run."""
