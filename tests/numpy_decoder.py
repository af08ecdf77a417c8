"""The decoder in float64 numpy, from Hugging Face tensors: plain loops over layers, heads and tokens."""

import numpy as np


def logits(tensors, ids, *, heads, kv_heads, epsilon, theta, windows):
    """float64 [T, V] of one sequence. `windows`: how many tokens back each layer sees, or None."""
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    T = len(ids)

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * w[name + ".weight"]

    def rotate(x):
        half = x.shape[-1] // 2
        angles = np.arange(T)[:, None] * theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def project(h, layer, which, n):
        x = linear(h, f"{layer}self_attn.{which}_proj").reshape(T, n, -1).swapaxes(0, 1)
        has_norm = f"{layer}self_attn.{which}_norm.weight" in w
        return norm(x, f"{layer}self_attn.{which}_norm") if has_norm else x

    x = w["model.embed_tokens.weight"][ids]
    for i, window in enumerate(windows):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm")
        q, k = rotate(project(h, layer, "q", heads)), rotate(project(h, layer, "k", kv_heads))
        v = project(h, layer, "v", kv_heads)
        out = np.stack([attend(q[n], k[n * kv_heads // heads], v[n * kv_heads // heads], window) for n in range(heads)])
        x = x + linear(out.swapaxes(0, 1).reshape(T, -1), layer + "self_attn.o_proj")
        h = norm(x, layer + "post_attention_layernorm")
        gate = linear(h, layer + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, layer + "mlp.up_proj"), layer + "mlp.down_proj")
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def attend(q, k, v, window):
    """Causal attention of one head, [T, H], a token at a time."""
    out = np.zeros_like(q)
    for t in range(len(q)):
        first = 0 if window is None else max(0, t + 1 - window)
        scores = k[first : t + 1] @ q[t] / np.sqrt(q.shape[-1])
        p = np.exp(scores - scores.max())
        out[t] = p / p.sum() @ v[first : t + 1]
    return out
