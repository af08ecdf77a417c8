import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.optimizer import adamw, schedule


def rates(kind, updates, *, warmup, total, final=0.0):
    s = schedule(kind, learning_rate=1.0, warmup_steps=warmup, total_updates=total, final_fraction=final)
    return [float(s(u)) for u in updates]


def test_cosine_counts_the_warmup_once_and_ends_at_the_last_update():
    got = rates("cosine", [11, 22, 110, 198, 209, 220], warmup=22, total=220)
    np.testing.assert_allclose(got, [0.5, 1.0, 0.586824089, 0.030153690, 0.007596123, 0], atol=1e-6)


def test_linear_and_constant():
    assert rates("linear", [0, 5, 10, 60, 110], warmup=10, total=110, final=0.2) == pytest.approx([0, 0.5, 1, 0.6, 0.2])
    assert rates("constant", [0, 5, 10, 500], warmup=10, total=20) == pytest.approx([0, 0.5, 1, 1])
    assert rates("constant", [0, 3], warmup=0, total=20) == pytest.approx([1, 1])


def test_decay_is_for_matrices_only():
    params = {
        "kernel": jnp.ones((2, 2)),
        "bias": jnp.ones(2),
        "norm": jnp.ones(2),
        "embedding": jnp.ones((2, 2)),
    }
    optimizer = adamw(lambda _: 0.1, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.5, max_grad_norm=1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    moved = {name: float(jnp.abs(u).max()) for name, u in updates.items()}
    assert moved == pytest.approx({"kernel": 0.05, "bias": 0, "norm": 0, "embedding": 0.05})


def test_gradients_are_clipped_by_their_global_norm():
    params = {"kernel": jnp.zeros(2)}
    clipped = adamw(lambda _: 1.0, beta1=0.0, beta2=0.0, epsilon=1.0, weight_decay=0.0, max_grad_norm=1.0)
    updates, _ = clipped.update({"kernel": jnp.array([30.0, 40.0])}, clipped.init(params), params)
    np.testing.assert_allclose(updates["kernel"], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-5)
