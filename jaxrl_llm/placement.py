"""The door's part that says what lies where: the learner's mesh and the engine's, checked against config and model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import Config
from jaxrl_llm.learner.trainable import param_shardings
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.decoder import Model
from jaxrl_llm.policy import Source, decoder, inference_shardings
from jaxrl_llm.sharding.mesh import make_mesh, mesh_sizes, regroup
from jaxrl_llm.sharding.rules import INFERENCE, AnyMesh, Layout
from jaxrl_llm.types import UserError


def training_mesh(c: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The learner's mesh, over all devices of the run or over these. Raises ShardingError or UserError."""
    mesh = make_mesh(c.mesh.to_dict(), devices)
    check_rows(c, mesh)
    return mesh


def check_rows(c: Config, mesh: AnyMesh) -> None:
    """Raises UserError unless the mesh divides the batch."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if c.learner.micro_batch_rows % parts:
        raise UserError(
            f"config.learner.micro_batch_rows={c.learner.micro_batch_rows} is not a multiple of the {parts} devices of "
            f"the mesh axes data={mesh.shape['data']} and fsdp={mesh.shape['fsdp']}"
        )
    for length in c.learner.row_lengths:
        if length % mesh.shape["context"]:
            raise UserError(
                f"config.learner.row_lengths={c.learner.row_lengths}: {length} is not a multiple of "
                f"config.mesh.context={mesh.shape['context']}"
            )


def inference_axes(c: Config, learner_devices: int) -> dict[str, int]:
    """Sizes of the engine's mesh: config.rollout.tensor devices (0: as many as the learner's tensor axis) hold the
    weights together, and there are as many such replicas as there is room for."""
    return {"data": -1, "tensor": c.rollout.tensor or mesh_sizes(c.mesh.to_dict(), learner_devices)["tensor"]}


def inference_mesh(c: Config, training: Mesh) -> Mesh:
    """The engine's mesh, over the learner's devices."""
    return regroup(training, inference_axes(c, training.size)["tensor"])


def inference_model(c: Config, source: Source, mesh: AnyMesh) -> Model:
    """The model as the engine computes it."""
    return decoder(c, source, c.rollout.dtype, layout=Layout(INFERENCE, mesh))


def abstract_weights(model: Model, mesh: AnyMesh, *, training: bool = False) -> Any:
    """Shapes of the model's parameters where they lie: in the engine, in its dtype, or in training, float32."""
    shardings = param_shardings(model, mesh) if training else inference_shardings(model, mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype if training else model.dtype, sharding=s),
        model.abstract,
        shardings,
    )


def check_weights(c: Config, source: Source, mesh: Mesh) -> None:
    """Raises ShardingError, UserError or ModelError unless the model can lie on the mesh, in training and in inference,
    and the folder's files hold it. Reads no weights."""
    model = decoder(c, source, c.model.dtype)
    param_shardings(model, mesh)
    inference_shardings(model, inference_mesh(c, mesh))
    if source.folder is not None:
        huggingface.check(source.folder, model)
