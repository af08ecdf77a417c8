"""Reinforcement learning for language models on TPUs and GPUs, in JAX."""

__version__ = "0.1.0"
