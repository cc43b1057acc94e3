"""Workloads: where the requests of a run come from."""
