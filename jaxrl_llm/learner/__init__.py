"""The SPMD side: the models that learn, and how a batch changes them.

trainable.py      a model with its optimizer: micro-batches, gradients, updates
actor.py          the policy and its loss
critic.py         the value model of PPO
reward_model.py   the online implicit reward model of PRIME
experience.py     from a packed batch to one that is complete: log-probabilities, corrections, advantages
learner.py        all of them on one mesh; the only file that jits a training step
"""
