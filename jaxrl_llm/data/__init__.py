"""Datasets to prompts, prompts to an order that resumes, rollouts to device batches."""
