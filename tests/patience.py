"""How long tests wait for what has to happen."""

SOON_S = 60.0  # on a machine with many times more to do than it can: no property, only an end
