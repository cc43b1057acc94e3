"""Modes: what one command does."""
