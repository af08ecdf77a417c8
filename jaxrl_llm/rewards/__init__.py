"""Rewards: functions that judge a response, and the pool of processes that runs them.

Importing this package is cheap on purpose: every worker process does it.
"""
