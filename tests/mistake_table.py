"""The table of users' mistakes that are found before a run begins."""

import json

import numpy as np
import pyarrow as pa

from tests import mistakes as m
from tests.mistakes import data, model, prompts, sets

LOSS = (
    "import jax.numpy as jnp\nfrom jaxrl_llm.algorithms.policy_losses import PolicyLoss\n"
    "def loss(logprobs, old_logprobs, advantages, mask, *, sequence_ids, num_sequences):\n"
)
ADVANTAGE = "import numpy as np\ndef advantage(experience):\n"
STATE = {"_data_files": [{"filename": "gone.arrow"}], "_fingerprint": "a", "_format_type": None, "_split": None}


# (name, arguments or a builder of them, words of the message)
COMMAND_LINE = [
    ("no recipe of that name", ["--config", "quickstrat"], ["'quickstrat'", "did you mean quickstart?"]),
    (
        "a folder as recipe",
        ["--config", "/tmp"],
        ["config '/tmp' is neither a file nor a built-in recipe", "quickstart"],
    ),
    ("typo in a key", sets("optimizer.learing_rate=1"), ["did you mean config.optimizer.learning_rate?"]),
    ("typo in a section", sets("optimiser.beta1=0.5"), ["did you mean config.optimizer.beta1?"]),
    ("key without its section", sets("learning_rate=1"), ["did you mean", " config.optimizer.learning_rate "]),
    ("key without a value", ["--config.seed"], ["--config.seed needs a value"]),
    ("argument without config", ["--seed=3"], ["'--seed=3' is unknown; did you mean --config.seed=...?"]),
    ("a lone file name", ["train.jsonl"], ["'train.jsonl' is unknown; expected --config NAME, --config.KEY=VALUE"]),
    ("typo in a value", sets("algorithm.aggregation=token_mean"), ["did you mean 'token-mean'?"]),
    ("text for a number", sets("optimizer.learning_rate=abc"), ["learning_rate must be a number, got 'abc'"]),
    ("bool for an integer", sets("rollout.n=True"), ["config.rollout.n must be an integer, got True (bool)"]),
    ("float for an integer", sets("rollout.n=8.0"), ["config.rollout.n must be an integer, got 8.0 (float)"]),
    ("number for a bool", sets("data.shuffle=1"), ["config.data.shuffle must be true or false, got '1'"]),
    (
        "number of 400 digits",
        sets("optimizer.learning_rate=" + "1" * 400),
        ["config.optimizer.learning_rate must be finite"],
    ),
    ("no literal", sets("optimizer.learning_rate={[]:1}"), ["must be a number, got '{[]:1}'"]),
    ("infinite", sets("optimizer.learning_rate=1e999"), ["config.optimizer.learning_rate must be finite, got inf"]),
    ("negative", sets("rollout.top_k=-1"), ["config.rollout.top_k must not be negative, got -1"]),
    ("text for a list of integers", sets("learner.row_lengths=x"), ["must be a list of integers, got 'x'"]),
    ("value for a section", sets("reward.weights=0.5"), ["config.reward.weights must be a section"]),
    ("two models", sets("model.hf_config={'model_type':'llama'}"), ["config.model.path or config.model.hf_config"]),
    ("no response", sets("data.max_response_length=0"), ["config.data.max_response_length must be more than 0"]),
    ("group of one", sets("rollout.n=1"), ["config.rollout.n must be at least 2, got 1"]),
    ("batches that do not fit", sets("data.train_batch_size=6"), ["=6 is not a multiple of", "mini_batch_size=4"]),
    ("more rows than sequences", sets("learner.micro_batch_rows=64"), ["more than the 8 sequences of a mini-batch"]),
    ("rows too short", sets("learner.row_lengths=(8,)"), ["has no room for a sequence of 16 tokens"]),
    ("both counts of steps", sets("total_epochs=2"), ["config.total_steps=4 and config.total_epochs=2"]),
    ("evaluation without data", sets("eval.every=2"), ["config.eval.every=2 but config.data.val is empty"]),
]

RECIPES = [
    ("raises", m.changes("c.optimiser.x = 1"), ["did you mean config.optimizer?", "(recipe.py:5)"]),
    ("ends the process", m.recipe("import sys\nsys.exit(3)\n"), ["recipe.py: SystemExit: 3 (recipe.py:2)"]),
    ("syntax", m.recipe("def get_config(:\n"), ["recipe.py: SyntaxError", "(recipe.py:1)"]),
    ("null bytes", m.recipe("\0"), ["recipe.py: SyntaxError: source code string cannot contain null bytes"]),
    ("no function", m.recipe("x = 1\n"), ["recipe.py has no function get_config()"]),
    ("no function of that name", m.recipe("get_config = 3\n"), ["recipe.py has no function get_config()"]),
    ("wrong type", m.recipe("def get_config():\n    return {}\n"), ["must return the config of", "got dict"]),
    ("wants an argument", m.recipe("def get_config(x):\n    pass\n"), ["get_config() of", "without arguments", "'x'"]),
    ("None", m.changes("c.seed = None"), ["config.seed must be an integer, got None"]),
    ("numpy float", m.changes("c.rollout.n = np.float64(4)"), ["config.rollout.n must be an integer, got 4.0 (float)"]),
    ("array", m.changes("c.learner.row_lengths = np.ones(2)"), ["config.learner.row_lengths must be a list"]),
    (
        "object",
        m.changes("c.reward.kwargs.f = {'x': object()}"),
        ["config.reward.kwargs.f.x", "must be a text, a number"],
    ),
    ("number as key", m.changes("c.reward.weights = {1: 2.0}"), ["keys must be texts, got 1 (int)"]),
    ("saved, unknown key", m.saved_config('{"seeed": 1}'), ["did you mean config.seed?"]),
    ("saved, wrong type", m.saved_config('{"seed": "x"}'), ["config.seed must be an integer, got 'x'"]),
    ("saved, broken", m.saved_config('{"seed": 1'), ["saved.json is not valid JSON: Expecting", "column 11"]),
    ("saved, empty", m.saved_config(""), ["saved.json is not valid JSON"]),
    ("saved, nested", m.saved_config("[" * 100_000), ["saved.json is not valid JSON: maximum recursion"]),
    ("saved, binary", m.saved_config("\udcff"), ["saved.json is not valid JSON: 'utf-8' codec"]),
]

DATA = [
    ("missing", sets("data.train=/nowhere/x.jsonl"), ["/nowhere/x.jsonl does not exist; nor does its folder"]),
    ("empty path", sets("data.train="), ["the path of a data file is empty"]),
    ("unknown extension", data("x.csv", "a,b\n"), ["x.csv has the unknown extension '.csv'; expected .jsonl"]),
    ("empty", data("x.jsonl", ""), ["x.jsonl holds no rows"]),
    (
        "broken line",
        data("x.jsonl", m.GOOD_ROW + '{"prompt": 1 2}\n' + m.GOOD_ROW),
        ["x.jsonl, line 2, column 14", "1 2}"],
    ),
    ("an array", data("x.json", '[{"prompt": "1"}]'), ["x.json, line 1: expected a JSON object", "one object a line"]),
    (
        "several lines",
        data("x.json", '{\n"prompt": "1"}'),
        ["x.json, line 1", "every line must be one whole JSON object"],
    ),
    ("binary", data("x.jsonl", bytes(range(256))), ["x.jsonl, line 1, column 1: broken JSON"]),
    ("not UTF-8", data("x.jsonl", b'{"prompt": "\xff"}'), ["x.jsonl, line 1: byte 13 is not UTF-8"]),
    ("UTF-16", data("x.jsonl", m.GOOD_ROW.encode("utf-16")), ["x.jsonl, line 1: byte 1 is not UTF-8"]),
    ("nested too deep", data("x.jsonl", m.GOOD_ROW + "[" * 100_000), ["x.jsonl, line 2: this JSON cannot be read"]),
    ("number of 5000 digits", data("x.jsonl", '{"a": ' + "1" * 5000 + "}"), ["x.jsonl, line 1", "4300 digits"]),
    ("half a character", prompts("\ud800"), ["rows.jsonl, row 9: character 1 is half of a surrogate pair"]),
    ("a folder as file", m.folder_in_place_of("x.jsonl", "data.train"), ["x.jsonl was not written by Dataset"]),
    ("Parquet cut short", m.parquet({"prompt": ["1+1="] * 99}, cut=20), ["rows.parquet cannot be read as Parquet"]),
    ("Parquet, hollow", data("x.parquet", b"PAR1" + bytes(99) + b"PAR1"), ["x.parquet cannot be read as Parquet"]),
    ("Parquet, empty", data("x.parquet", b""), ["x.parquet cannot be read as Parquet"]),
    (
        "Parquet, null prompts",
        m.parquet({"prompt": pa.nulls(8), "answer": ["2"] * 8}),
        ["8 empty", "'prompt' the right"],
    ),
    ("Parquet, null answers", m.parquet({"prompt": ["1"], "answer": pa.nulls(1)}), ["row 1: the answer in column"]),
    (
        "Parquet, binary prompts",
        m.parquet({"prompt": [b"1+1="], "answer": ["2"]}),
        ["row 1: a prompt must be", "bytes"],
    ),
    ("saved, state broken", m.saved_dataset("{"), ["state.json of a saved dataset is not valid JSON"]),
    ("saved, state a list", m.saved_dataset("[]"), ["state.json of a saved dataset must hold a JSON object"]),
    ("saved, file lost", m.saved_dataset(json.dumps(STATE)), ["saved cannot be read as a saved dataset", "gone.arrow"]),
    (
        "no such column",
        sets("data.prompt_key=answr"),
        ["no column 'answr'; did you mean 'answer'?", "Set data.prompt_key"],
    ),
    ("number as prompt", prompts(12), ["row 9: a prompt must be a string or a list of messages, got int 12"]),
    (
        "no messages",
        data("x.jsonl", '{"prompt": [], "answer": "2"}'),
        ["1 empty", "is data.prompt_key='prompt' the right"],
    ),
    (
        "unknown role",
        prompts([{"role": "usr", "content": "1"}]),
        ["message 1 has the role 'usr', did you mean 'user'?"],
    ),
    ("no content", prompts([{"role": "user"}]), ["row 9: message 1 needs a string 'content', got None"]),
    ("misspelt content", prompts([{"role": "user", "contnet": "1"}]), ["it has 'contnet'"]),
    ("text as message", prompts(["1+1="]), ["message 1 must be an object with role and content, got str '1+1='"]),
    ("answer in the prompt", prompts([{"role": "assistant", "content": "2"}]), ["the last message is the assistant's"]),
    ("null answer", m.rows({"prompt": "1+1=", "answer": None}), ["row 9: the answer in column 'answer' is empty"]),
    ("all too long", sets("data.max_prompt_length=3"), ["20 too long", "raise data.max_prompt_length"]),
    ("one too long", sets("data.max_prompt_length=5", "data.overlong=error"), ["the prompt has 6 tokens, over"]),
    (
        "fewer than a batch",
        sets("data.train=arithmetic:count=2"),
        ["2 rows, fewer than", "lower data.train_batch_size"],
    ),
    ("arithmetic typo", sets("data.train=arithmetic:cuont=2"), ["unknown key 'cuont'; did you mean 'count'?"]),
    ("variable of no template", sets("data.template_kwargs.think=False"), ["kwargs.think: the tokenizer has no chat"]),
    ("no demonstrations", m.rows(keys=("task=sft",)), ["row 1 has no column 'response'", "Set data.response_key"]),
]

MODELS = [
    ("missing", sets("model.path=/nowhere/m"), ["model folder '/nowhere/m' does not exist"]),
    ("a file", lambda at: sets(f"model.path={m.file_in(at)}"), ["is a file, expected a folder"]),
    ("no name of the hub", sets("model.path=my model/1"), ["'my model/1' is neither a folder here nor could it"]),
    ("no config", model(m.remove("config.json")), ["model has no config.json; is it a Hugging Face model folder?"]),
    ("config cut", model(m.cut("config.json", 40)), ["config.json is not valid JSON"]),
    ("config binary", model(m.write("config.json", b"\xff\xfe")), ["config.json is not valid JSON: 'utf-8' codec"]),
    ("config a list", model(m.write("config.json", "[]")), ["config.json must hold a JSON object, got list"]),
    ("config a folder", model(m.folder("config.json")), ["config.json cannot be read: Is a directory"]),
    ("unknown architecture", m.hf(model_type="gpt2"), ["model_type 'gpt2' is unknown; known families: llama"]),
    ("size missing", m.hf(hidden_size=None), ["config.json of a llama model lacks 'hidden_size'"]),
    ("size as text", m.hf(hidden_size="128"), ["config.json: hidden_size must be a whole number above 0, got '128'"]),
    ("size of zero", m.hf(num_attention_heads=0), ["num_attention_heads must be a whole number above 0, got 0"]),
    ("epsilon as text", m.hf(rms_norm_eps="x"), ["rms_norm_eps must be a number above 0, got 'x'"]),
    ("flag as text", m.hf(tie_word_embeddings="yes"), ["tie_word_embeddings must be true or false, got 'yes'"]),
    ("rope as text", m.hf(rope_scaling="linear"), ["rope_scaling must be an object, got 'linear'"]),
    (
        "rope factor",
        m.hf(rope_scaling={"type": "linear", "factor": "x"}),
        ["factor of the rope must be a number", "'x'"],
    ),
    ("unknown rope", m.hf(rope_scaling={"type": "yarn"}), ["rope type 'yarn' is not supported"]),
    ("activation", m.hf(hidden_act="gelu"), ["hidden_act='gelu' is not supported, only 'silu'"]),
    ("EOS as text", m.hf(eos_token_id="1"), ["config.json: eos_token_id='1'", "no token of a vocabulary of 16"]),
    ("EOS too large", model(m.edit("generation_config.json", eos_token_id=[1, 99])), ["99 is no token", "generation_"]),
    ("generation broken", model(m.write("generation_config.json", "{")), ["generation_config.json is not valid JSON"]),
    (
        "layer types",
        m.hf(model_type="qwen2", use_sliding_window=True, layer_types=["x"]),
        ["layer_types names 1 layers"],
    ),
    ("context too short", sets("data.max_response_length=57", "learner.row_lengths=()"), ["65 is longer than the 64"]),
    ("no tokenizer", model(m.remove("tokenizer.json")), ["holds no tokenizer: expected tokenizer.json"]),
    ("tokenizer folder", sets("model.tokenizer=/nowhere"), ["folder '/nowhere' does not exist"]),
    ("tokenizer cut", model(m.cut("tokenizer.json", 200)), ["the tokenizer in folder", "does not load", "damaged?"]),
    (
        "tokenizer hollow",
        model(m.write("tokenizer.json", "{}")),
        ["the tokenizer in folder", "does not load: KeyError"],
    ),
    ("its config a list", model(m.write("tokenizer_config.json", "[]")), ["tokenizer_config.json must hold a JSON"]),
    ("no EOS", model(m.edit("tokenizer_config.json", eos_token=None)), ["has no EOS token", "set eos_token in"]),
    ("EOS a number", model(m.edit("tokenizer_config.json", eos_token=3)), ["does not load: TypeError: Special token"]),
    ("other vocabulary", m.hf(vocab_size=12), ["has 16 tokens, the model's vocabulary only 12", "not belong together"]),
    (
        "template refuses",
        m.template("{{ raise_exception('no') }}"),
        ["row 1: the chat template refused messages", "no;"],
    ),
    ("template fails", m.template("{{ 'a' + 3 }}"), ["row 1: the chat template refused", "data.prompt_style='plain'"]),
    ("no weights", model(m.remove("model.safetensors")), ["model has no model.safetensors"]),
    ("pickle", model(m.pickled), ["pytorch_model.bin is a pickle and is never read: convert it to safetensors"]),
    ("weights cut", model(m.cut("model.safetensors", 90_000)), ["model.safetensors is damaged or cut short"]),
    ("weights empty", model(m.write("model.safetensors", "")), ["model.safetensors is damaged or cut short"]),
    ("weights a folder", model(m.folder("model.safetensors")), ["model.safetensors is damaged or cut short"]),
    (
        "index hollow",
        model(m.write("model.safetensors.index.json", "{}")),
        ["index.json must have an object weight_map"],
    ),
    (
        "index of lost files",
        model(m.write(m.INDEX, '{"weight_map": {"a": "b"}}')),
        ["index.json names a file that is not there", "model has no b"],
    ),
    ("tensor missing", model(m.tensors(lambda t: t.pop(m.NORM))), ["missing: model.norm.weight"]),
    ("tensor unknown", model(m.tensors(lambda t: t.update(extra=np.ones(3)))), ["unknown: extra"]),
    ("tensor's shape", model(m.norm(np.ones(3))), ["shape of model.norm.weight: (3,), the config says (128,)"]),
    ("tensor's type", model(m.norm(np.ones(128, np.int8))), ["type of model.norm.weight: I8, expected one of"]),
    ("other sizes", m.hf(head_dim=16), ["shape of model.layers.{0,1,2,3}.self_attn.q_proj.weight"]),
]

PLACES = [
    (
        "too many devices",
        sets("mesh.fsdp=3"),
        ["mesh fsdp=3 x tensor=4 needs 12 devices, but there are 8", "config.mesh"],
    ),
    ("two free axes", sets("mesh.fsdp=-1", "mesh.tensor=-1"), ["at most one of them -1", "config.mesh"]),
    ("no such size", sets("mesh.fsdp=0"), ["mesh sizes must be positive", "'fsdp': 0"]),
    ("heads", sets("mesh.fsdp=1", "mesh.tensor=8"), ["layers.o.kernel: dimension 'heads' of size 4", "axis tensor=8"]),
    (
        "vocabulary",
        sets("model.vocab_pad_multiple=3"),
        ["embedding: dimension 'vocab' of size 18", "axis fsdp=2 x tensor=4"],
    ),
    ("rows", sets("learner.micro_batch_rows=3"), ["config.learner.micro_batch_rows=3 is not a multiple of the 2"]),
    ("a read-only place", sets("run_dir=/proc/x"), ["config.run_dir='/proc/x' cannot be written"]),
    ("a file as folder", lambda at: sets(f"run_dir={m.file_in(at)}"), ["mine' cannot be written"]),
    ("a file above it", lambda at: sets(f"run_dir={m.file_in(at)}/run"), ["mine/run' cannot be written"]),
]

FUNCTIONS = [
    ("no file", sets("reward.functions=/nowhere.py:fn"), ["there is no Python file /nowhere.py"]),
    ("no function named", sets("reward.functions=my.py"), ["name the function in it, my.py:FUNCTION"]),
    ("typo", sets("reward.functions=exact_macth"), ["did you mean 'exact_match'?"]),
    ("no function", m.reward("def fm(): pass\n"), ["rewards.py 'fn'; expected fm"]),
    ("a number", m.reward("fn = 3\n"), ["fn is a int, expected a function"]),
    ("a class", m.reward("class fn:\n    pass\n"), ["fn is a class, expected a function"]),
    ("written in C", m.reward("fn = max\n"), ["its parameters cannot be read", "wrap it in a function of your own"]),
    ("signature", m.reward("def fn(text): pass\n"), ["requires the parameter 'text'", "solution_str"]),
    ("import", m.reward("import nowhere\n"), ["cannot be imported: ModuleNotFoundError", "(rewards.py:1)"]),
    ("syntax", m.reward("def fn(\n"), ["cannot be imported: SyntaxError", "(rewards.py:1)"]),
    ("ends the process", m.reward("exit(2)\n"), ["cannot be imported: SystemExit: 2 (rewards.py:1)"]),
    ("none at all", sets("reward.functions=()"), ["expected at least one reward function"]),
    ("weight", sets("reward.weights.acc=high"), ["a finite number as the weight of 'acc', got 'high'"]),
    ("arguments", sets("reward.kwargs.exact_match=3"), ["kwargs of reward function 'exact_match' must be a section"]),
    ("argument", sets("reward.kwargs.exact_match.x=3"), ["'x' cannot be set. Its own parameters are: none"]),
    ("arguments of another", sets("reward.kwargs.exact.x=3"), ["kwargs for 'exact'", "did you mean 'exact_match'?"]),
    (
        "loss, no file",
        sets("algorithm.loss=/nowhere.py:l"),
        ["config.algorithm.loss '/nowhere.py:l'", "no Python file"],
    ),
    ("loss, signature", m.loss("def loss(logprobs):\n    pass\n"), ["loss is called with logprobs, old_logprobs"]),
    ("loss, raises", m.loss(LOSS + "    return 1 / 0\n"), ["mine.py:loss", "ZeroDivisionError", "(mine.py:4)"]),
    ("loss, None", m.loss(LOSS + "    pass\n"), ["mine.py:loss' must return a", "PolicyLoss", "got None"]),
    (
        "loss, if",
        m.loss(LOSS + "    if mask.sum(): pass\n"),
        ["Attempted boolean conversion", "(mine.py:4); under jax.jit"],
    ),
    ("loss, shape", m.loss(LOSS + "    return PolicyLoss(logprobs[0], {})\n"), ["[2, 5] here", "got float32 [5]"]),
    ("loss, type", m.loss(LOSS + "    return PolicyLoss(mask, {})\n"), ["floating-point number a token", "got bool"]),
    (
        "loss, metrics",
        m.loss(LOSS + "    return PolicyLoss(logprobs, {'a': 1.0})\n"),
        ["the metric 'a' must be a pair"],
    ),
    ("advantage, typo", sets("algorithm.advantage=grop"), ["did you mean 'grpo'?"]),
    ("advantage, arguments", m.advantage("def advantage(experience, beta): pass\n"), ["missing a required", "'beta'"]),
    ("advantage, raises", m.advantage(ADVANTAGE + "    return nothing\n"), ["NameError", "(mine.py:3)"]),
    (
        "advantage, numpy",
        m.advantage(ADVANTAGE + "    return np.asarray(experience.rewards)\n"),
        ["__array__", "(mine.py:3)"],
    ),
    (
        "advantage, no Advantages",
        m.advantage(ADVANTAGE + "    return experience.rewards\n"),
        ["Advantages(advantages, returns), got float32 [7]"],
    ),
]

ALGORITHMS = [
    ("kl estimator", sets("algorithm.kl_estimator=k4"), ["config.algorithm.kl_estimator='k4' is not one of 'k1'"]),
    ("exact KL in the reward", sets("algorithm.kl_reward_estimator=exact"), ["kl_reward_estimator='exact' is not one"]),
    ("reweighting", sets("algorithm.reweight=max_mim"), ["config.algorithm.reweight='max_mim'", "'max_min'?"]),
    ("target without a weight", sets("algorithm.kl_target=0.1"), ["set config.algorithm.kl_reward_coef, the weight"]),
    ("dual clip", sets("algorithm.clip_ratio_c=1.0"), ["config.algorithm.clip_ratio_c must be above 1, got 1.0"]),
    ("fraction", sets("algorithm.kl_cov_ratio=2.0"), ["config.algorithm.kl_cov_ratio must be at most 1, got 2.0"]),
    ("own constant", sets("algorithm.constants.beta=1"), ["algorithm.constants.beta is no argument of", "'vanilla'"]),
    (
        "typo in an own constant",
        m.loss(
            LOSS.replace("num_sequences", "num_sequences, beta=1") + "    return PolicyLoss(-beta * logprobs, {})\n",
            "algorithm.constants.bta=1",
        ),
        ["config.algorithm.constants.bta is no argument of", "did you mean 'beta'?"],
    ),
    ("no components", sets("algorithm.advantage=gdpo"), ["needs config.algorithm.components", "names of the reward"]),
    ("filter's range alone", sets("filter.mean_range=(0.2,0.8)"), ["mean_range=(0.2, 0.8) needs config.filter.by"]),
    (
        "filter's range of one",
        sets("filter.by=reward", "filter.entropy_range=(0.2,)"),
        ["config.filter.entropy_range=(0.2,) must be two numbers"],
    ),
    (
        "filter and epochs",
        sets("filter.by=reward", "total_steps=0", "total_epochs=1"),
        ["a step reads as many prompts as it needs; set config.total_steps instead"],
    ),
    ("filter without a bound", sets("filter.by=reward", "filter.max_batches=0"), ["max_batches must be more than 0"]),
    ("filter's batches alone", sets("filter.gen_batch_size=8"), ["gen_batch_size=8 needs config.filter.by"]),
    ("buffer", sets("reward.overlong_buffer=9"), ["config.reward.overlong_buffer=9 is more than", "length=8"]),
    (
        "level of weights",
        sets("rollout_correction.rollout_is=tokens"),
        ["config.rollout_correction: ", "rollout_is 'tokens' is unknown; expected one of token, sequence"],
    ),
    (
        "threshold",
        sets("rollout_correction.rollout_is=token", "rollout_correction.rollout_is_threshold=high"),
        ["config.rollout_correction: ", "'high'"],
    ),
    (
        "two criteria, one threshold",
        sets("rollout_correction.rollout_rs=token_k1,seq_max_k1", "rollout_correction.rollout_rs_threshold=0.5_2.0"),
        ["config.rollout_correction: ", "seq_max_k1"],
    ),
    (
        "corrected twice",
        sets("rollout_correction.bypass=True", "rollout_correction.rollout_is=token"),
        ["is to the sampler already", "would correct twice", "reinforce"],
    ),
    (
        "a baseline that needs what is bypassed",
        sets("rollout_correction.bypass=True", "algorithm.advantage=optimal_token_baseline"),
        ["leaves out the forward pass"],
    ),
    ("critic's path", sets("algorithm.advantage=gae", "critic.path=/nowhere"), ["folder '/nowhere' does not exist"]),
    ("critic's rate", sets("critic.learning_rate=0.0"), ["config.critic.learning_rate must be more than 0"]),
    ("typo in the critic", sets("critic.warmup=3"), ["config.critic.warmup does not exist", "warmup_steps"]),
]

REFUSED = {
    "command line": COMMAND_LINE,
    "recipe": RECIPES,
    "data": DATA,
    "model": MODELS,
    "place": PLACES,
    "function": FUNCTIONS,
    "algorithm": ALGORITHMS,
}
