import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import DecoderConfig, ModelError, Rope
from jaxrl_llm.models.decoder import Cache, build
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.sharding.rules import INFERENCE, TRAINING
from tests import hf_folders, numpy_decoder

# Every switch at once, and a window in one layer only.
CONFIG = DecoderConfig(
    vocab_size=30,
    num_layers=2,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp=24,
    norm_epsilon=1e-5,
    rope=Rope(),
    max_position=64,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    windows=(None, 3),
)


def random_params(model, seed=0):
    """Weights, biases and norms that all matter."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        mean = float("norm" in jax.tree_util.keystr(path))
        return jnp.asarray(rng.normal(mean, 0.3, shape.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, model.abstract)


MODEL = build(CONFIG)
PARAMS = random_params(MODEL)


@jax.jit
def hidden_of(params, ids, positions, segments):
    return MODEL.bind(params).hidden(ids, positions, segments)


def rows_of(sequences, places, width, pad=0):
    """ids, positions and segments [1, width] with each sequence at its place."""
    ids, positions, segments = np.full((1, width), pad), np.zeros((1, width), int), np.zeros((1, width), int)
    for number, (sequence, place) in enumerate(zip(sequences, places, strict=True), 1):
        at = slice(place, place + len(sequence))
        ids[0, at], positions[0, at], segments[0, at] = sequence, np.arange(len(sequence)), number
    return ids, positions, segments


def stack(*rows):
    return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


def test_padding_on_either_side_and_its_ids_change_nothing():
    prompt = [11, 12, 13, 14, 15]
    plain = rows_of([prompt], [0], 5)
    places = [0, 2, 5, 0, 2, 5]
    padded = stack(*(rows_of([prompt], [at], 10, pad) for at, pad in zip(places, [0, 0, 0, 7, 8, 9], strict=True)))
    assert padded[1][1].tolist() == [0, 0, 0, 1, 2, 3, 4, 0, 0, 0]

    @jax.jit
    def logprobs(ids, positions, segments):
        module = MODEL.bind(PARAMS)
        x, options = (
            module.hidden(ids, positions, segments),
            {"temperature": 1.0, "chunk": 4, "entropy": False},
        )
        return x, token_logprobs(x, module.head_matrix(), ids, segments, vocab_size=30, **options)[0]

    x, expected = logprobs(*plain)
    assert float(expected[0, 1:].max()) < -0.1
    padded_x, got = logprobs(*padded)
    for row, at in enumerate(places):
        np.testing.assert_allclose(padded_x[row, at : at + 5], x[0], atol=1e-5)
        np.testing.assert_allclose(got[row, at : at + 5], expected[0], atol=1e-5)
        assert float(jnp.abs(got[row]).sum()) == pytest.approx(float(jnp.abs(expected).sum()), abs=1e-4)
    np.testing.assert_array_equal(got[3:], got[:3])


def test_packed_sequences_are_as_in_rows_of_their_own():
    sequences = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3]]
    packed = hidden_of(PARAMS, *rows_of(sequences, [0, 5, 8], 12))
    rows = hidden_of(PARAMS, *stack(*(rows_of([s], [0], 12) for s in sequences)))
    for row, (place, sequence) in enumerate(zip([0, 5, 8], sequences, strict=True)):
        n = len(sequence)
        np.testing.assert_allclose(packed[0, place : place + n], rows[row, :n], atol=1e-5)
    changed = hidden_of(PARAMS, *rows_of([[29] * 5, *sequences[1:]], [0, 5, 8], 12))
    np.testing.assert_array_equal(changed[0, 5:10], packed[0, 5:10])


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama"}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 3}, (3, 3)),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 1,
            },
            (None, 4),
        ),
        (
            {"model_type": "qwen3", "hidden_size": 64, "head_dim": 32, "tie_word_embeddings": True},
            (None, None),
        ),
    ],
)
def test_logits_equal_a_float64_loop_over_layers_heads_and_tokens(tmp_path, changes, windows):
    hf = hf_folders.hf_config(**changes)
    tensors = hf_folders.make_tensors(hf)
    model, params = hf_folders.load(hf_folders.write(tmp_path / "model", hf, tensors))
    ids = np.random.default_rng(1).integers(0, 100, 12)
    sizes = {"heads": 4, "kv_heads": 2, "epsilon": 1e-5, "theta": 1e4}
    expected = numpy_decoder.logits(tensors, ids, windows=windows, **sizes)
    np.testing.assert_allclose(hf_folders.logits(model, params, ids[None])[0], expected, atol=1e-4)


def test_rematerialisation_changes_memory_and_not_the_gradients():
    ids, positions, segments = rows_of([np.arange(64) % 30], [0], 64)
    plain = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False}
    gradients, temporary = {}, {}
    for mode in ("none", "dots", "full"):
        model = build(CONFIG.replace(num_layers=4, windows=(None, 3, 3, None), **plain), remat=mode)
        params = random_params(model)

        def loss(params, model=model):
            return jnp.sum(jnp.sin(model.bind(params).hidden(ids, positions, segments)))

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        gradients[mode], temporary[mode] = compiled(params), compiled.memory_analysis().temp_size_in_bytes
    assert temporary["full"] < temporary["dots"] < temporary["none"]
    for mode in ("dots", "full"):
        for got, expected in zip(*map(jax.tree.leaves, (gradients[mode], gradients["none"])), strict=True):
            scale = max(1.0, float(jnp.abs(expected).max()))
            np.testing.assert_allclose(got, expected, atol=1e-5 * scale)
    used = [float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients["none"]["layers"])]
    assert min(used) > 1e-3


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters_and_logits():
    ids, positions, segments = rows_of([np.arange(12)], [0], 12)
    model = build(CONFIG, dtype="bfloat16")

    @jax.jit
    def forward(params):
        module = model.bind(params)
        x = module.hidden(ids, positions, segments)
        return x, module.logits(x)

    x, logits = forward(PARAMS)
    exact = hidden_of(PARAMS, ids, positions, segments)
    assert (x.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    error = np.abs(np.asarray(x, np.float32) - exact)
    assert 0 < error.mean() < 0.02
    assert error.max() < 0.2
    expected = np.asarray(exact) @ np.asarray(PARAMS["head"]).T
    assert np.abs(logits - expected).mean() < 0.05


@pytest.mark.parametrize("view", [12, 16])
def test_prefill_and_decode_equal_the_full_forward(view):
    T, lengths = (
        12,
        np.array([1, 8, 3]),
    )  # the first is decoded from its second token on, all pass the window of 3
    ids = np.random.default_rng(2).integers(0, 30, (3, T))
    positions = np.broadcast_to(np.arange(T), ids.shape)
    expected = hidden_of(PARAMS, ids, positions, np.ones_like(ids))
    prompts = np.where(np.arange(8) < lengths[:, None], ids[:, :8], 29)
    last, cache = jax.jit(lambda p, *x: MODEL.bind(p).prefill(*x))(PARAMS, prompts, lengths)
    rows = np.arange(3)
    np.testing.assert_allclose(last, expected[rows, lengths - 1], atol=1e-5)
    # What lies beyond the prompt is never read, whatever it is.
    beyond = ((0, 0), (0, 0), (0, 0), (0, 8), (0, 0))
    cache = Cache(*(jnp.pad(x, beyond, constant_values=1e3) for x in cache))
    decode = jax.jit(lambda p, *x: MODEL.bind(p).decode(*x, view))
    for step in range(T - max(lengths)):
        at = lengths + step
        x, cache = decode(PARAMS, ids[rows, at], at, cache)
        np.testing.assert_allclose(x, expected[rows, at], atol=1e-5)
    assert cache.k.shape == (2, 3, 2, 16, 8)


def test_ids_that_pad_the_vocabulary_have_logits_of_minus_infinity():
    model = build(CONFIG.replace(vocab_pad_multiple=32))
    params = random_params(model)
    assert params["embedding"].shape == params["head"].shape == (32, 16)
    x = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
    logits = np.asarray(model.bind(params).logits(x))
    assert np.isneginf(logits[..., 30:]).all()
    np.testing.assert_allclose(logits[..., :30], x @ np.asarray(params["head"])[:30].T, atol=1e-5)


def test_tied_embeddings_stay_one_array_and_untied_ones_two():
    tied = build(CONFIG.replace(tie_embeddings=True))
    params = jax.tree.map(lambda x: x + 1, random_params(tied))
    assert "head" not in params
    np.testing.assert_array_equal(tied.bind(params).head_matrix(), params["embedding"])
    np.testing.assert_array_equal(MODEL.bind(PARAMS).head_matrix(), PARAMS["head"])
    assert float(jnp.abs(PARAMS["head"] - PARAMS["embedding"]).max()) > 0.1


def test_random_parameters_have_the_announced_shapes_and_dimension_names():
    assert jax.eval_shape(MODEL.init, jax.random.key(0)) == MODEL.abstract
    assert {leaf.dtype for leaf in jax.tree.leaves(MODEL.abstract)} == {jnp.dtype("float32")}
    names = jax.tree.leaves(MODEL.dims, is_leaf=lambda x: isinstance(x, tuple))
    assert [len(dims) for dims in names] == [x.ndim for x in jax.tree.leaves(MODEL.abstract)]
    assert {dim for dims in names for dim in dims} <= TRAINING.keys() & INFERENCE.keys()


def test_an_unknown_way_to_rematerialise_and_a_wrong_number_of_windows_are_refused():
    with pytest.raises(ModelError, match="remat 'some' is unknown; choose one of none, full, dots"):
        build(CONFIG, remat="some")
    with pytest.raises(ModelError, match="2 attention windows for 3 layers"):
        CONFIG.replace(num_layers=3)
