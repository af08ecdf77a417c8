"""Reinforcement learning for language models on TPUs and GPUs, in JAX."""

import os

# Without this, importing transformers' tokenizers prints advice to install PyTorch, which nothing here uses.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"
