"""Engines that generate, behind one protocol (engine.py)."""
