"""Hydra groups (YAML) and their code; the one place that knows plugins and kernels."""
