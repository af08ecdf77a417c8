"""The mathematics of reinforcement learning for language models: pure, jittable functions of arrays.

    segments.py        sums over sequences and back: how padded and packed batches give the same numbers
    aggregation.py     from a loss per token to one number: a weight per token
    advantages.py      how much better a sample was than expected
    policy_losses.py   the policy's loss per token
    kl.py              estimators of the divergence from the reference policy

Token arrays come in any shape, [T], [B, T] or [A, M, B, T], with integer `sequence_ids` of the same shape
that index arrays of S sequences; padding carries the id S. Sums, ratios and advantages are float32 whatever
the dtype of the inputs (float64 stays float64).
"""
