"""Every key of a run, with its default and meaning. Recipes start from here and change a few."""

from jaxrl_llm.config import Config


def get_config() -> Config:
    c = Config()
    c.task = "rl"  # "rl": generate, score, learn. "sft": learn data.response_key of the training data
    c.seed = 0  # of initial weights, data order and sampling
    c.deterministic = False  # True: the run repeats bit for bit on GPUs too, slower (on CPUs and TPUs runs always do)
    c.run_dir = "runs/run"  # checkpoints, metrics, samples; the same folder again resumes the run
    c.total_steps = 100  # training steps: one batch of prompts each; 0: by total_epochs
    c.total_epochs = 0  # passes over the training data; used when total_steps is 0
    c.model = _model()
    c.mesh = _mesh()
    c.data = _data()
    c.rollout = _rollout()
    c.reward = _reward()
    c.filter = _filter()
    c.algorithm = _algorithm()
    c.rollout_correction = _rollout_correction()
    c.critic = _critic()
    c.prime = _prime()
    c.learner = _learner()
    c.optimizer = _optimizer()
    c.eval = _eval()
    c.checkpoint = _checkpoint()
    c.log = _log()
    c.lock()
    return c


def _model() -> Config:
    """The policy."""
    c = Config()
    c.path = ""  # Hugging Face folder (or hub name) with config, weights and tokenizer
    c.tokenizer = ""  # folder of the tokenizer; "": that of model.path
    c.hf_config = Config()  # start from random weights: a Hugging Face config instead of model.path
    c.dtype = "float32"  # of computation in training, "float32" or "bfloat16"; master weights are always float32
    # What the backward pass computes again: "none" nothing, "dots" all but matrix products, "full" all but attention
    c.remat = "none"
    # What computes attention over rows: "xla" anywhere, "splash" on TPUs, "cudnn" on NVIDIA GPUs (both: bfloat16);
    # "auto": the fastest that can run
    c.attention = "auto"
    c.logits_chunk = 128  # tokens of each row whose logits exist at the same time
    c.vocab_pad_multiple = (
        128  # embedding rows are padded to a multiple of it, so that fsdp x context x tensor divides them
    )
    return c


def _mesh() -> Config:
    """Sizes of the device mesh; one may be -1: the devices that are left."""
    c = Config()
    c.data = 1  # replicas of the weights, each with its part of the batch
    c.fsdp = -1  # the weights cut over devices, each with its part of the batch
    c.expert = 1  # experts of mixture models over devices
    c.context = 1  # long sequences over devices
    c.tensor = 1  # heads, ffn and vocabulary over devices
    return c


def _data() -> Config:
    """Prompts and how they become batches."""
    c = Config()
    c.train = ()  # JSONL or Parquet files, Hugging Face datasets folders, or arithmetic:... generators
    c.val = ()  # the same, for evaluation
    c.prompt_key = "prompt"  # column with a text or a list of {"role", "content"} messages
    c.answer_key = "answer"  # column given to reward functions as ground_truth; "": none
    c.response_key = "response"  # column with the demonstration (task "sft" only)
    c.source_key = "data_source"  # column that names the source in metrics; rows without it use the file's name
    c.system_prompt = ""  # put before every prompt
    c.prompt_style = "auto"  # "chat": a text becomes a user message; "plain": texts only; "auto": by the column's type
    c.template_kwargs = Config()  # passed on to the tokenizer's chat template
    c.max_prompt_length = 512  # tokens, after the chat template
    c.max_response_length = 512  # tokens
    c.overlong = "drop"  # prompts that are too long: "drop" (and say how many) or "error"
    c.train_batch_size = 64  # prompts a step
    c.shuffle = True  # another order every epoch, by seed
    c.remainder = "drop"  # rows at an epoch's end that fill no batch: "drop" (others each time, if shuffled) or "carry"
    c.val_limit = 0  # evaluate only the first so many rows; 0: all
    return c


def _rollout() -> Config:
    """How training samples."""
    c = Config()
    c.engine = "jax"  # the inference engine
    c.n = 8  # samples a prompt
    c.temperature = 1.0
    c.top_k = 0  # sample among so many most likely tokens; 0: all
    c.top_p = 1.0  # sample among the most likely tokens that together have this probability
    c.min_p = 0.0  # sample among tokens with at least this fraction of the most likely one's probability
    c.stop = ()  # texts that end a response, special tokens apart (end-of-sequence ids always do)
    c.dtype = "float32"  # of weights, cache and computation, "float32" or "bfloat16"
    c.tensor = (
        0  # devices that hold the engine's weights together, on as many replicas as there is room; 0: mesh.tensor
    )
    c.slots = 64  # sequences that are generated at the same time
    c.prefill_batch = 8  # prompts that are read at the same time
    c.steps_per_dispatch = 16  # tokens of each sequence between two looks at which have ended
    return c


def _reward() -> Config:
    """What a response is worth."""
    c = Config()
    c.functions = ("gsm8k",)  # built-in names or path/to/file.py:function
    c.weights = Config()  # by component name; 1.0 where nothing is said, 0.0 logs a component only
    c.kwargs = Config()  # by function name: fixed keyword arguments
    c.workers = 2  # processes that score
    c.timeout_s = 10.0  # seconds for one sample; then it is left out of its group
    # Soft penalty on long responses (DAPO), as the component "overlong": over the last overlong_buffer tokens before
    # data.max_response_length it falls from 0 to -overlong_factor; 0: none
    c.overlong_buffer = 0
    c.overlong_factor = 1.0
    return c


def _filter() -> Config:
    """Dynamic sampling: prompts whose samples tell nothing are replaced by others from the stream."""
    c = Config()
    c.by = ""  # "reward" or a reward component: a prompt stays if its samples differ in it; "": no filter
    c.mean_range = ()  # (lowest, highest) mean of it over a prompt's samples; (): any
    c.entropy_range = ()  # the same for the mean sampling entropy, nats a token
    c.max_batches = 10  # batches of prompts generated at most for one step
    c.at_bound = "fill"  # then: "fill" the batch with prompts that tell nothing, or "error"
    c.gen_batch_size = 0  # prompts in each of these batches; 0: data.train_batch_size
    return c


def _algorithm() -> Config:
    """The advantage and the loss. Each takes those of the keys below that it names; see docs/algorithms.md."""
    c = Config()
    c.advantage = "grpo"  # name in jaxrl_llm.algorithms.advantages, or path/to/file.py:function
    c.normalize_by_std = True  # divide by the group's standard deviation (False: Dr. GRPO)
    c.gamma = 1.0  # discount of later rewards
    c.lam = 1.0  # lambda of GAE
    c.f_norm = 1.0  # GPG: divisor of the advantage
    c.components = ()  # GDPO: the reward components that are normalised each for itself; weights: reward.weights
    c.outcome_coef = 5.0  # PRIME: weight of the outcome reward
    c.process_coef = 5.0  # PRIME: weight of the process rewards
    c.loss = "vanilla"  # name in jaxrl_llm.algorithms.policy_losses, or path/to/file.py:function
    c.clip_ratio_low = 0.2  # the ratio of new to old probability is clipped at 1 - this
    c.clip_ratio_high = 0.2  # and at 1 + this (DAPO: 0.28)
    c.clip_ratio_c = 3.0  # dual clip: bound on the loss of actions with negative advantage, in multiples of it
    c.tau_pos = 1.0  # SAPO: temperature of the gate where the advantage is positive
    c.tau_neg = 1.05  # SAPO: and where it is negative
    c.clip_cov_ratio = 0.0002  # Clip-Cov: fraction of the tokens that are left out
    c.clip_cov_lb = 1.0  # Clip-Cov: among those whose covariance is above this
    c.clip_cov_ub = 5.0  # Clip-Cov: and below this
    c.kl_cov_ratio = 0.0002  # KL-Cov: fraction of the tokens, of the highest covariance, that are held back
    c.ppo_kl_coef = 1.0  # KL-Cov: weight of what holds them back
    c.dro_beta = 0.1  # DRO: weight of the squared log-ratio
    c.constants = Config()  # keyword arguments of an advantage or a loss of your own
    c.aggregation = "token-mean"  # how token losses make one number: see docs/algorithms.md
    c.length_norm = 0  # divisor of seq-mean-token-sum-norm; 0: data.max_response_length
    c.mask_truncated = False  # responses that were cut off count in baselines only (DAPO's overlong filtering)
    c.kl_loss_coef = 0.0  # weight of the KL to the initial model in the loss; 0: none
    c.kl_estimator = "k3"  # k1, abs, k2, k3, k1+, k3+, or exact (over the whole vocabulary)
    c.kl_reward_coef = 0.0  # weight of the KL to the initial model in the reward; 0: none
    c.kl_reward_estimator = "k1"  # k1, abs, k2, k3
    c.kl_target = 0.0  # the weight in the reward follows this KL a token; 0: it is fixed
    c.kl_horizon = 10_000  # sequences: how slowly it follows
    c.entropy_coef = 0.0  # weight of the entropy bonus
    c.reweight = ""  # PF-PPO, samples drawn again by reward: "pow", "max_min" or "max_random"; "": none
    c.reweight_power = 2.0  # of the reward, for "pow"
    return c


def _rollout_correction() -> Config:
    """What is done where the sampler's probabilities are not the learner's; see docs/algorithms.md."""
    c = Config()
    c.rollout_is = ""  # importance weights: "token", "sequence"; "": none
    c.rollout_is_threshold = "2.0"  # weights are cut at it; "0.5_5.0": those outside are 0 (IcePop)
    c.rollout_is_batch_normalize = False  # divide the weights by their mean
    c.rollout_rs = ""  # rejection: token_k1, seq_mean_k3, ... or several with commas; "": none
    c.rollout_rs_threshold = ""  # one for each of them, with commas: "2.0" or "0.5_2.0"
    c.bypass = False  # the sampler's log-probabilities are the old ones: no forward pass for these
    return c


def _critic() -> Config:
    """The value model, where the advantage needs one (gae)."""
    c = Config()
    c.path = ""  # Hugging Face folder (or hub name) of its backbone; "": the policy's
    c.learning_rate = 1e-5  # schedule and all else as in optimizer
    c.warmup_steps = 0  # training steps in which it learns and the policy does not
    c.epochs = 1  # passes over each batch
    c.value_clip = 0.5  # values move at most so far from the old ones
    c.aggregation = "token-mean"  # as in algorithm
    return c


def _prime() -> Config:
    """The online reward model, where the advantage needs process rewards (prime)."""
    c = Config()
    c.learning_rate = 1e-6  # schedule and all else as in optimizer
    c.beta = 0.05  # reward of a token: beta times its log-ratio to the initial model
    return c


def _learner() -> Config:
    """How a batch becomes optimizer updates."""
    c = Config()
    c.mini_batch_size = 64  # prompts an optimizer update; divides data.train_batch_size
    c.epochs = 1  # passes over each batch
    c.max_skipped_steps = 3  # steps in a row with a loss or gradient that is not finite, after which the run stops
    c.micro_batch_rows = 16  # rows of tokens in one forward and backward pass, over all devices
    c.packing = True  # several sequences in a row; False: one
    c.row_lengths = ()  # lengths that rows may have; (): a quarter, half and all of the longest sequence
    return c


def _optimizer() -> Config:
    """AdamW."""
    c = Config()
    c.learning_rate = 1e-6
    c.schedule = "constant"  # after the warm-up: "constant", "cosine" or "linear" down to final_fraction
    c.warmup_steps = 0  # optimizer updates from 0 to learning_rate
    c.final_fraction = 0.0  # of learning_rate, at the last update
    c.beta1 = 0.9
    c.beta2 = 0.999
    c.epsilon = 1e-8
    c.weight_decay = 0.01
    c.max_grad_norm = 1.0  # gradients are scaled down to this norm; 0: never
    c.first_moment_dtype = "float32"  # "float32", or "bfloat16" to save two bytes a parameter
    return c


def _eval() -> Config:
    """Measuring the policy on data.val."""
    c = Config()
    c.every = 10  # steps; 0: never
    c.before_training = True
    c.n = 1  # samples a prompt
    c.temperature = 1.0  # 0: greedy
    c.top_k = 0
    c.top_p = 1.0
    return c


def _checkpoint() -> Config:
    """Saving and resuming."""
    c = Config()
    c.every = 50  # steps; the last step is always saved; 0: only the last
    c.keep_last = 2  # checkpoints to keep
    c.keep_best = 1  # further ones to keep, by the evaluation metric
    c.best_metric = ""  # "": the first val-core metric
    # "auto": go on from the newest checkpoint in run_dir; "never": refuse a run_dir with checkpoints; a run folder or a
    # checkpoint in one: begin there, with a copy of it, while run_dir has no checkpoint of its own
    c.resume = "auto"
    return c


def _log() -> Config:
    """What is shown while training."""
    c = Config()
    c.tensorboard = True
    c.samples_every = 10  # steps between printed generations; 0: never
    c.samples = 2  # how many
    return c
