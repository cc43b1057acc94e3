"""Routers: which replica takes a request."""
