"""What several families of plugins need and the core does not."""
