"""One behaviour a file, one folder a hook family. Of ours, a plugin imports only `core`."""
