"""The policy: which files it comes from, its structure, and its weights, before training or after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import checkpoint, resume
from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import DamagedCheckpoint
from jaxrl_llm.config import Config
from jaxrl_llm.configs import base
from jaxrl_llm.data import chat
from jaxrl_llm.learner.trainable import param_shardings
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Model, build
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.reshard import Reshard
from jaxrl_llm.sharding.rules import INFERENCE, ONE_DEVICE, TRAINING, AnyMesh, Layout, tree_shardings
from jaxrl_llm.types import UserError


class Source(NamedTuple):
    """Where the model comes from."""

    folder: Path | None  # Hugging Face folder with the weights; None: random weights
    hf: Mapping[str, Any]  # its config.json
    generation: Mapping[str, Any]  # its generation_config.json
    tokenizer_folder: Path
    eos_ids: tuple[int, ...]
    tokenizer: Any  # None where only shapes are asked for


def shape_source(c: Config) -> Source:
    """What shapes need: the model's config; neither weights nor tokenizer."""
    folder = huggingface.find(c.model.path) if c.model.path else None
    hf = huggingface.read_config(folder) if folder else c.model.hf_config.to_dict()
    eos = huggingface.eos_ids(huggingface.generation_config(folder, hf), hf)
    return Source(folder, hf, {}, Path(), eos, None)


def model_source(c: Config) -> Source:
    """Finds the model's files and its tokenizer; reads no weights."""
    folder = huggingface.find(c.model.path) if c.model.path else None
    hf = huggingface.read_config(folder) if folder else c.model.hf_config.to_dict()
    tokenizer_folder = huggingface.find(c.model.tokenizer, "tokenizer") if c.model.tokenizer else folder
    assert tokenizer_folder is not None  # validate() asks for one of them
    tokenizer = chat.load_tokenizer(str(tokenizer_folder))
    generation = huggingface.generation_config(folder, hf)
    ids: dict[Any, None] = dict.fromkeys((*huggingface.eos_ids(generation, hf), tokenizer.eos_token_id))
    if len(tokenizer) > hf.get("vocab_size", 0):
        raise UserError(
            f"the tokenizer in {tokenizer_folder} has {len(tokenizer)} tokens, the model's vocabulary only "
            f"{hf.get('vocab_size')}: they do not belong together"
        )
    return Source(folder, hf, generation, tokenizer_folder, tuple(ids), tokenizer)


def decoder(
    c: Config,
    source: Source,
    dtype: str,
    *,
    remat: str = "none",
    layout: Layout = ONE_DEVICE,
    value_head: bool = False,
) -> Model:
    """The model's structure, computing in `dtype`, laid out by `layout`."""
    config = decoder_config(c, source)
    return build(config, dtype=dtype, remat=remat, layout=layout, attention=c.model.attention, value_head=value_head)


def decoder_config(c: Config, source: Source) -> DecoderConfig:
    """The model's sizes and switches. Raises UserError if a sequence may be longer than the model was made for."""
    config = huggingface.decoder_config(source.hf, vocab_pad_multiple=c.model.vocab_pad_multiple)
    longest = c.data.max_prompt_length + c.data.max_response_length
    if longest > config.max_position:
        raise UserError(
            f"config.data.max_prompt_length + config.data.max_response_length = {longest} is longer than the "
            f"{config.max_position} tokens that the model was made for (max_position_embeddings)"
        )
    return config


def initial_params(c: Config, source: Source, model: Model, mesh: AnyMesh) -> Any:
    """float32 parameters in the training layout: the folder's, or random ones by config.seed."""
    shardings = param_shardings(model, mesh)
    if source.folder is not None:
        return huggingface.load(source.folder, model, shardings)
    return jax.jit(model.init, out_shardings=shardings)(jax.random.key(c.seed))


def inference_shardings(model: Model, mesh: AnyMesh) -> Any:
    """Where each parameter lies in the engine."""
    return tree_shardings(model.abstract, model.dims, INFERENCE, mesh)


def critic_source(c: Config, source: Source) -> Source:
    """Where the critic's backbone comes from; its tokenizer is the policy's. Raises UserError if its vocabulary is too
    small for it."""
    if not c.critic.path:
        return source
    folder = huggingface.find(c.critic.path)
    hf = huggingface.read_config(folder)
    if source.tokenizer is not None and len(source.tokenizer) > hf.get("vocab_size", 0):
        raise UserError(
            f"config.critic.path={c.critic.path!r} has a vocabulary of {hf.get('vocab_size')}, the policy's tokenizer "
            f"{len(source.tokenizer)} tokens: the critic must read the same tokens"
        )
    return source._replace(folder=folder, hf=hf)


def critic_params(c: Config, source: Source, model: Model, mesh: AnyMesh) -> Any:
    """float32 parameters of a critic in the training layout: the folder's backbone (random by config.seed without one)
    under a value head that says 0."""
    language_model = decoder(c, source, c.model.dtype, layout=Layout(TRAINING, mesh))
    shardings = param_shardings(model, mesh)
    head = jax.jit(lambda: jnp.zeros(model.abstract["value"].shape), out_shardings=shardings["value"])()
    params = initial_params(c, source, language_model, mesh)
    return {**{name: params[name] for name in shardings if name != "value"}, "value": head}


def any_mesh(model: Model) -> Mesh:
    """As many of this machine's devices as divide the model's width: it may be another machine than the run's."""
    devices = jax.devices()
    count = max(n for n in range(1, len(devices) + 1) if model.config.embed % n == 0)
    return make_mesh({"fsdp": -1}, devices[:count])


def trained_params(c: Config, step: int | None, model: Model, shardings: Any) -> tuple[Any, int]:
    """Parameters of a checkpoint of the run in config.run_dir, in these shardings, and the checkpoint's step; None: the
    newest one. Raises UserError if there is none, or if it is damaged."""
    folder = Path(c.run_dir).absolute() / "checkpoints"
    steps = checkpoint.saved_steps(folder)
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{folder} has no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.abstract, shardings)
    try:
        return checkpoint.restore_params(folder / str(step), abstract), step
    except DamagedCheckpoint as error:
        if not (folder / str(step)).exists():
            raise UserError(f"checkpoint {folder / str(step)} was just deleted by the run that writes there") from error
        raise UserError(f"checkpoint {folder / str(step)} is damaged: {error}; choose another with --step") from error


def config_of(run: Path | None, model: str | None, recipe: str | None, overrides: Sequence[tuple[str, str]]) -> Config:
    """The config of a run, or of a model folder (or hub name) with the other keys from a recipe, by default from base;
    then changed by (key, text) pairs."""
    if run is not None:
        c = resume.load_run(run)
    else:
        c = configs.load(recipe) if recipe else base.get_config()
        c.model.path, c.model.tokenizer = model, ""
        for key in list(c.model.hf_config):
            del c.model.hf_config[key]
    for key, text in overrides:
        configs.override(c, key, text)
    if run is not None:
        c.run_dir = str(run)
    return c


class Weights(NamedTuple):
    """A policy as an engine takes it."""

    model: Model
    mesh: Mesh
    params: Any  # in the INFERENCE layout and config.rollout.dtype
    checksum: int
    step: int  # of the run's checkpoint; 0 for a model that comes from no run


def weights(c: Config, source: Source, mesh: Mesh, *, trained: bool, step: int | None = None) -> Weights:
    """A checkpoint's weights (see `trained_params`), or those of the model folder, for inference."""
    model = decoder(c, source, c.rollout.dtype, layout=Layout(INFERENCE, mesh))
    if trained:
        params, step = trained_params(c, step, model, param_shardings(model, mesh))
    else:
        params, step = initial_params(c, source, model, mesh), 0
    params, checksum = Reshard(params, inference_shardings(model, mesh), model.dtype)(params)
    return Weights(model, mesh, params, checksum, step)


def check_length(prompt: int, max_tokens: int, limit: int, what: str) -> None:
    """Raises UserError unless a prompt of so many tokens and its response are within the model's limit."""
    if prompt + max_tokens <= limit:
        return
    room = limit - prompt
    fix = f"give --max_tokens {room} or less, or a shorter prompt" if room > 0 else "give a shorter prompt"
    raise UserError(
        f"{what} has {prompt} tokens; with --max_tokens {max_tokens} that makes {prompt + max_tokens}, more than the "
        f"{limit} tokens that the model was made for (max_position_embeddings): {fix}"
    )
