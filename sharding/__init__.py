"""Meshes, logical-axis rules and resharding. Knows nothing of models."""
