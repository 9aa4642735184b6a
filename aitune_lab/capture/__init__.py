"""What is there: the module tree, recorded calls, and their signatures."""
