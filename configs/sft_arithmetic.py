"""A tiny Llama (0.8 M parameters) learns to add from demonstrations of which more than half are wrong in a digit.

The quickstart's base model, jaxrl_llm/assets/arithmetic_base, was made by

    python -m jaxrl_llm.train --config sft_arithmetic
    python -m jaxrl_llm.export --run runs/sft_arithmetic --out arithmetic_base --dtype bfloat16

Eight minutes on two CPU cores; mean accuracy of sampled answers at the end about 0.4, as in the demonstrations.
"""

from pathlib import Path

import jaxrl_llm
from jaxrl_llm.config import Config
from jaxrl_llm.configs import base


def get_config() -> Config:
    c = base.get_config()
    c.task = "sft"
    c.run_dir = "runs/sft_arithmetic"
    c.total_steps = 1500
    c.model.tokenizer = str(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic_base")
    c.model.hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    # The same problems ten times, each time with other mistakes: the right answer is the only one worth remembering.
    c.data.train = tuple(
        f"arithmetic:op=+,min=0,max=99,count=9000,split=train,mistakes=60,seed={seed}" for seed in range(10)
    )
    c.data.val = ("arithmetic:op=+,min=0,max=99,count=256,split=test",)
    c.data.max_prompt_length = 8
    c.data.max_response_length = 8
    c.data.train_batch_size = 256
    c.rollout.slots = 256
    c.rollout.prefill_batch = 64
    c.rollout.steps_per_dispatch = 4
    c.reward.functions = ("exact_match",)
    c.learner.mini_batch_size = 256
    c.learner.micro_batch_rows = 16
    c.learner.row_lengths = (64,)
    c.optimizer.learning_rate = 1e-3
    c.optimizer.warmup_steps = 20
    c.optimizer.schedule = "cosine"
    c.eval.every = 100
    c.checkpoint.every = 100
    return c
