"""Looking up input embeddings in a table that is cut over devices.

Shapes: B rows, T tokens, V vocabulary, D model width.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_llm.sharding.rules import Layout


def look_up(table_VD: jax.Array, token_ids_BT: jax.Array, dtype: Any, layout: Layout) -> jax.Array:
    """[B, T, D] in `dtype`, as activations lie. Ids beyond the table take its last row.

    Where the layout cuts the table's width for it ("lookup_width"), each device looks up its columns of the tokens of
    all devices, and they exchange what each needs: as many bytes as the activations have, and no copy of the table. The
    gradients of a token that occurs often are added up in the table's own dtype.
    """
    table_VD = layout.constrain(table_VD, ("lookup_vocab", "lookup_width"))
    axes = layout.axes("lookup_width")

    def local(table_VD: jax.Array, token_ids_BT: jax.Array) -> jax.Array:
        x_BTD = table_VD.at[token_ids_BT].get(mode="clip").astype(dtype)
        for axis in reversed(axes):  # the axis that cuts finest comes first, so that columns stay in order
            split = next((i for i, dim in enumerate(("batch", "length")) if axis in layout.axes(dim)), None)
            if split is None:
                x_BTD = jax.lax.all_gather(x_BTD, axis, axis=2, tiled=True)
            else:
                x_BTD = jax.lax.all_to_all(x_BTD, axis, split, 2, tiled=True)
        return x_BTD

    if not axes:
        return layout.constrain(local(table_VD, token_ids_BT), ("batch", "length", "norm"))
    B, T = token_ids_BT.shape
    of_table = layout.spec("embedding", table_VD.shape, ("lookup_vocab", "lookup_width"))
    of_ids = layout.spec("tokens", (B, T), ("lookup_batch", "norm"))
    of_rows = layout.spec("embedded tokens", (B, T, table_VD.shape[1]), ("batch", "length", "norm"))
    return jax.shard_map(local, mesh=layout.mesh, in_specs=(of_table, of_ids), out_specs=of_rows, check_vma=False)(
        table_VD, token_ids_BT
    )
