"""Recipes. base.py holds every key with its default and meaning."""
