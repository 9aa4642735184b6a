"""Is it right, is it fast: comparison with eager, a higher-precision reference, and honest timing."""
