import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm import export, train
from jaxrl_llm.learner.trainable import param_shardings
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.config import ModelError
from jaxrl_llm.models.decoder import build
from jaxrl_llm.sharding.mesh import ShardingError, make_mesh
from jaxrl_llm.types import UserError
from tests.runs import comparable, run, small


def test_every_step_is_written_once_under_the_names_of_the_field(straight):
    run_dir, lines, shown, _ = straight
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {"val-core/arithmetic/acc/mean@1"} <= set(lines[0]) & set(lines[2]) & set(lines[4])
    expected = (
        "actor/pg_loss actor/pg_clipfrac actor/ppo_kl actor/entropy actor/grad_norm actor/lr critic/rewards/mean "
        "critic/score/mean critic/advantages/mean response_length/mean response_length/clip_ratio prompt_length/mean "
        "timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/update_actor timing_s/update_weights "
        "timing_s/step perf/throughput perf/total_num_tokens perf/compilations training/global_step "
        "reward/acc/mean reward/failed"
    )
    for line in lines[1:]:
        assert set(expected.split()) <= set(line)
    assert "step 4/4" in shown
    assert "20 rows" in shown
    assert "4 rows left out of each epoch" in shown
    assert (run_dir / "config.json").exists()


def test_sampler_and_learner_agree_on_log_probabilities(straight):
    _, lines, _, _ = straight
    assert max(line["training/rollout_logprobs_diff_max"] for line in lines[1:]) < 1e-4


@pytest.mark.parametrize("packing", [True, False])
def test_they_agree_at_another_temperature_packed_and_padded(tmp_path, packing):
    c = small(tmp_path, **{"rollout.temperature": 0.7, "learner.packing": packing, "eval.every": 0, "total_steps": 2})
    lines, _, _ = run(c)
    assert max(line["training/rollout_logprobs_diff_max"] for line in lines) < 1e-4
    assert max(abs(line["actor/ppo_kl"]) for line in lines) < 1e-2


def test_nothing_compiles_after_the_first_steps(straight):
    _, lines, _, _ = straight
    assert lines[3]["perf/compilations"] == lines[4]["perf/compilations"]


def test_samples_are_kept_whole(straight, tmp_path):
    run(small(tmp_path, **{"log.samples_every": 1, "log.samples": 2, "total_steps": 2, "eval.every": 0}))
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    assert set(rows[0]) == {"step", "prompt", "response", "reward", "ground_truth"}
    assert rows[0]["prompt"].endswith("=")


def test_a_loss_of_the_users_own_trains_and_a_wrong_signature_is_refused_early(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.algorithms.policy_losses import vanilla\n"
        "def loss(logprobs, old_logprobs, advantages, mask, *, sequence_ids, num_sequences, clip_ratio_low):\n"
        "    return vanilla(logprobs, old_logprobs, advantages, mask, sequence_ids=sequence_ids,\n"
        "        num_sequences=num_sequences, clip_ratio_low=clip_ratio_low, clip_ratio_high=0.2, clip_ratio_c=3.0)\n"
        "def short(logprobs, advantages):\n    return logprobs\n"
    )
    options = {"eval.every": 0, "total_steps": 1}
    (own,), _, _ = run(small(tmp_path / "own", **options, **{"algorithm.loss": f"{tmp_path}/mine.py:loss"}))
    (built_in,), _, _ = run(small(tmp_path / "built_in", **options))
    assert own["actor/pg_loss"] == built_in["actor/pg_loss"]
    with pytest.raises(UserError, match="short is called with logprobs, old_logprobs, advantages, mask"):
        run(small(tmp_path / "short", **options, **{"algorithm.loss": f"{tmp_path}/mine.py:short"}))
    assert not (tmp_path / "short").exists()


def test_export_is_the_policy_and_loads_as_a_model_folder(straight, tmp_path):
    run_dir, _, _, state = straight
    export.run(["--run", str(run_dir), "--out", str(tmp_path / "model"), "--dtype", "float32"])
    hf = huggingface.read_config(tmp_path / "model")
    model = build(huggingface.decoder_config(hf, vocab_pad_multiple=128))
    one = make_mesh({}, jax.devices()[:1])
    params = huggingface.load(tmp_path / "model", model, param_shardings(model, one))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), state.params)
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_sft_learns_the_demonstrations_through_the_same_loop(tmp_path):
    c = small(tmp_path, "sft_arithmetic", **{"checkpoint.every": 0, "optimizer.warmup_steps": 1, "total_steps": 6})
    lines, shown, _ = run(c)
    losses = [line["actor/loss"] for line in lines[1:]]
    assert losses[-1] < losses[0]
    assert "val-core/arithmetic/acc/mean@1" in lines[6]
    assert not {k for line in lines[1:] for k in line if k.startswith(("critic/", "rollout_corr/"))}
    assert "step 6/6  loss" in shown


def test_samples_that_cannot_be_scored_leave_their_group_and_are_counted(tmp_path):
    (tmp_path / "r.py").write_text(
        "def fn(solution_str, ground_truth, extra_info):\n"
        "    if len(solution_str) % 2:\n        raise RuntimeError('odd')\n    return 1.0\n"
    )
    c = small(tmp_path / "run", **{"reward.functions": f"{tmp_path}/r.py:fn", "total_steps": 1, "eval.every": 0})
    (line,), _, _ = run(c)
    assert 0 < line["reward/failed"] < 16
    assert line["critic/rewards/mean"] == 1.0
    assert line["reward/fn/mean"] == 1.0


def command(*argv):
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.train", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_mistakes_on_the_command_line_are_one_message_and_exit_1(tmp_path):
    done = command("--config", "quickstart", "--config.optimizer.learing_rate=1", f"--config.run_dir={tmp_path / 'r'}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: config.optimizer.learing_rate does not exist; did you mean")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


def test_help_names_the_recipes():
    done = command("--help")
    assert done.returncode == 0
    assert "quickstart" in done.stdout
    assert command().returncode == 2


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.path", "/nowhere/model", "model folder '/nowhere/model' does not exist"),
        ("data.train", "/nowhere/data.jsonl", "/nowhere/data.jsonl"),
        ("data.max_prompt_length", "3", "data.max_prompt_length"),
        ("data.max_response_length", "640", "max_position_embeddings"),
        ("seed", "-1", "config.seed must not be negative"),
        ("checkpoint.every", "3", "config.checkpoint.every=3 is not a multiple of config.eval.every=2"),
        ("mesh.expert", "2", "no model family has experts"),
        ("reward.weights.acc", "high", "a finite number as the weight of 'acc'"),
        ("reward.functions", "exact_macth", "did you mean 'exact_match'"),
        (
            "learner.micro_batch_rows",
            "3",
            "config.learner.micro_batch_rows=3 is not a multiple of the 2 devices",
        ),
        ("mesh.fsdp", "3", "there are 8"),
        ("algorithm.loss", "vanila", "did you mean 'vanilla'"),
        ("run_dir", "/proc/run", "config.run_dir='/proc/run' cannot be written"),
    ],
)
def test_mistakes_are_refused_before_training(tmp_path, key, value, words):
    c = small(tmp_path, **{"learner.row_lengths": ()})
    configs.override(c, key, value)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        run(c)
    assert isinstance(error.value, (UserError, ModelError, ShardingError))


def test_a_loss_that_is_never_finite_stops_the_run_and_keeps_the_batches(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.algorithms.policy_losses import vanilla\n"
        "def loss(*args, clip_ratio_low, clip_ratio_high, clip_ratio_c, **keywords):\n"
        "    clips = dict(clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c)\n"
        "    out = vanilla(*args, **clips, **keywords)\n"
        "    return out._replace(token_loss=out.token_loss / 0.0 * 0.0)\n"
    )
    run_dir = tmp_path / "run"
    c = small(run_dir, **{"algorithm.loss": f"{tmp_path}/mine.py:loss", "learner.max_skipped_steps": 3})
    words = r"not finite in each of the steps 1 to 3; .*the last good checkpoint is .*/checkpoints/2\. Look at"
    with pytest.raises(UserError, match=words):
        run(c)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor/skipped_updates"] for line in lines[1:]] == [2, 2, 2]
    assert lines[3]["actor/loss"] == "nan"
    rows = [json.loads(line) for line in (run_dir / "skipped" / "step_3.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    with np.load(run_dir / "skipped" / "step_3.npz") as arrays:
        assert {"token_ids", "advantages", "old_logprobs"} <= set(arrays)
    with pytest.raises(UserError, match="each of the steps 1 to 3"):
        run(c)  # how many there were in a row is in the checkpoint


def test_deterministic_sets_the_flag_in_time_and_the_run_repeats(straight, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # put back at the end
    c = small(tmp_path / "run", deterministic=True)
    (tmp_path / "c.json").write_text(configs.to_json(c))
    train.run(["--config", str(tmp_path / "c.json")])
    assert "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"].split()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert comparable(lines) == comparable(straight[1])


def test_deterministic_that_comes_too_late_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match=r"needs XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment before"):
        run(small(tmp_path, deterministic=True))
