"""Decoder-only transformers in Flax, and their Hugging Face import and export. Knows nothing of RL."""
