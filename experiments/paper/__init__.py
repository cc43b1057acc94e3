"""What experiments.compare and experiments.figure share: run folders, metrics, intervals, style."""
