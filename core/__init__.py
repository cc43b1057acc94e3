"""The engine core. Imports the standard library, numpy and pluggy alone."""
