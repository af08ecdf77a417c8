"""Every key of a run, with its default and meaning. Recipes start from here and change a few."""

from jaxrl_llm.config import Config


def get_config() -> Config:
    c = Config()
    c.task = "rl"  # "rl": generate, score, learn. "sft": learn data.response_key of the training data
    c.seed = 0  # of initial weights, data order and sampling
    c.run_dir = "runs/run"  # checkpoints, metrics, samples; the same folder again resumes the run
    c.total_steps = 100  # training steps: one batch of prompts each; 0: by total_epochs
    c.total_epochs = 0  # passes over the training data; used when total_steps is 0

    c.model = m = Config()
    m.path = ""  # Hugging Face folder (or hub name) with config, weights and tokenizer
    m.tokenizer = ""  # folder of the tokenizer; "": that of model.path
    m.hf_config = Config()  # start from random weights: a Hugging Face config instead of model.path
    m.dtype = "float32"  # of computation in training, "float32" or "bfloat16"; master weights are always float32
    m.remat = "none"  # what the backward pass computes again: "none", "dots" (keeps matmuls), "full" (keeps nothing)
    m.logits_chunk = 128  # tokens of each row whose logits exist at the same time
    m.vocab_pad_multiple = 1  # embedding rows are padded to a multiple of it, so that the tensor axis divides them

    c.mesh = x = Config()  # sizes of the device mesh; one may be -1: the devices that are left
    x.data = 1  # replicas of the weights, each with its part of the batch
    x.fsdp = -1  # the weights cut over devices, each with its part of the batch
    x.expert = 1  # experts of mixture models over devices
    x.context = 1  # long sequences over devices
    x.tensor = 1  # heads, ffn and vocabulary over devices

    c.data = d = Config()
    d.train = ()  # JSONL or Parquet files, Hugging Face datasets folders, or arithmetic:... generators
    d.val = ()  # the same, for evaluation
    d.prompt_key = "prompt"  # column with a text or a list of {"role", "content"} messages
    d.answer_key = "answer"  # column given to reward functions as ground_truth; "": none
    d.response_key = "response"  # column with the demonstration (task "sft" only)
    d.source_key = "data_source"  # column that names the source in metrics; rows without it use the file's name
    d.system_prompt = ""  # put before every prompt
    d.prompt_style = "auto"  # "chat": a text becomes a user message; "plain": texts only; "auto": by the column's type
    d.template_kwargs = Config()  # passed on to the tokenizer's chat template
    d.max_prompt_length = 512  # tokens, after the chat template
    d.max_response_length = 512  # tokens
    d.overlong = "drop"  # prompts that are too long: "drop" (and say how many) or "error"
    d.train_batch_size = 64  # prompts a step
    d.shuffle = True  # another order every epoch, by seed
    d.remainder = "drop"  # rows at the end of an epoch that fill no batch: "drop" (other ones each epoch) or "carry"
    d.val_limit = 0  # evaluate only the first so many rows; 0: all

    c.rollout = r = Config()
    r.engine = "jax"  # the inference engine
    r.n = 8  # samples a prompt
    r.temperature = 1.0
    r.top_k = 0  # sample among so many most likely tokens; 0: all
    r.top_p = 1.0  # sample among the most likely tokens that together have this probability
    r.min_p = 0.0  # sample among tokens with at least this fraction of the most likely one's probability
    r.stop = ()  # texts that end a response (the tokenizer's end-of-sequence ids always do)
    r.dtype = "float32"  # of weights, cache and computation, "float32" or "bfloat16"
    r.slots = 64  # sequences that are generated at the same time
    r.prefill_batch = 8  # prompts that are read at the same time
    r.steps_per_dispatch = 16  # tokens of each sequence between two looks at which have ended

    c.reward = w = Config()
    w.functions = ("gsm8k",)  # built-in names or path/to/file.py:function
    w.weights = Config()  # by component name; 1.0 where nothing is said, 0.0 logs a component only
    w.kwargs = Config()  # by function name: fixed keyword arguments
    w.workers = 2  # processes that score
    w.timeout_s = 10.0  # seconds for one sample; then it is left out of its group

    c.algorithm = a = Config()
    a.advantage = "grpo"  # name in jaxrl_llm.algorithms.advantages, or path/to/file.py:function
    a.normalize_by_std = True  # divide by the group's standard deviation (False: Dr. GRPO)
    a.loss = "vanilla"  # name in jaxrl_llm.algorithms.policy_losses, or path/to/file.py:function
    a.clip_ratio_low = 0.2  # the ratio of new to old probability is clipped at 1 - this
    a.clip_ratio_high = 0.2  # and at 1 + this (DAPO: 0.28)
    a.clip_ratio_c = 3.0  # dual clip: bound on the loss of actions with negative advantage, in multiples of it
    a.aggregation = "token-mean"  # how token losses make one number: see docs/algorithms.md
    a.length_norm = 0  # divisor of seq-mean-token-sum-norm; 0: data.max_response_length
    a.kl_loss_coef = 0.0  # weight of the KL to the initial model in the loss; 0: no reference model is kept
    a.kl_estimator = "k3"  # k1, abs, k2, k3, k1+, k3+
    a.entropy_coef = 0.0  # weight of the entropy bonus

    c.learner = l = Config()
    l.mini_batch_size = 64  # prompts an optimizer update; divides data.train_batch_size
    l.epochs = 1  # passes over each batch
    l.micro_batch_rows = 16  # rows of tokens in one forward and backward pass, over all devices
    l.packing = True  # several sequences in a row; False: one
    l.row_lengths = ()  # lengths that rows may have; (): a quarter, half and all of the longest sequence

    c.optimizer = o = Config()  # AdamW
    o.learning_rate = 1e-6
    o.schedule = "constant"  # after the warm-up: "constant", "cosine" or "linear" down to final_fraction
    o.warmup_steps = 0  # optimizer updates from 0 to learning_rate
    o.final_fraction = 0.0  # of learning_rate, at the last update
    o.beta1 = 0.9
    o.beta2 = 0.999
    o.epsilon = 1e-8
    o.weight_decay = 0.01
    o.max_grad_norm = 1.0  # gradients are scaled down to this norm; 0: never

    c.eval = e = Config()
    e.every = 10  # steps; 0: never
    e.before_training = True
    e.n = 1  # samples a prompt
    e.temperature = 1.0  # 0: greedy
    e.top_k = 0
    e.top_p = 1.0

    c.checkpoint = k = Config()
    k.every = 50  # steps; the last step is always saved; 0: only the last
    k.keep_last = 2  # checkpoints to keep
    k.keep_best = 1  # further ones to keep, by the evaluation metric
    k.best_metric = ""  # "": the first val-core metric
    k.resume = "auto"  # "auto": go on from the latest checkpoint in run_dir; "never": refuse a run_dir with checkpoints

    c.log = g = Config()
    g.tensorboard = True
    g.samples_every = 10  # steps between printed generations; 0: never
    g.samples = 2  # how many

    c.lock()
    return c
