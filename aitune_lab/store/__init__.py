"""What aitune_lab keeps on this machine."""
