"""Tools for tests of aitune_lab and of backends for it."""
