"""What a run is, as frozen dataclasses: one per section of the YAML files, every field with its meaning.

A field without a default is required: a config file sets it. `null` means "derived": the comment says from what.
Nothing here imports JAX, so a bad value is reported before a device is touched. Rules: `angpt_jax.rules`;
parsing: `angpt_jax.cli`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

# What a list in model.remat may name: what the maps of a layer give, by role, and what goes into the last two of them.
SAVEABLE = ("query", "key", "value", "attention", "attention_out", "up", "gate", "hidden", "down")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and architecture of the decoder.

    Args:
        arch: recipe that fills the places of the skeleton, a name in angpt_jax.archs
        width: length of the residual stream (D)
        layers: number of decoder layers (N)
        heads: attention heads (H); must divide width
        vocab: rows of the embedding (V); at least the tokenizer's size
        context: tokens in a window (L)
        feed_forward: width of the MLP (F); null is 4 * width
        kv_heads: heads of keys and values (grouped-query attention); must divide heads; null is as many as heads
        tied_embeddings: use the embedding as the head too, one matrix for both
        rope_theta: base of the rotary angles
        compute_dtype: dtype of the matrix products; parameters, joins, norms, softmax and loss stay float32
        scan_layers: compile one layer and scan over it (true) or unroll all layers (false); same parameters
        remat: what the backward pass computes again; none: nothing; full: each layer, from the stream before it; a list
            such as [attention, up]: all but these arrays of each layer
        attention: which code computes attention: reference (whole score matrix), blocks (without most of what no query
            sees), xla, cudnn (NVIDIA GPU), splash (TPU), or auto, the best of them that can do it here
        loss_vocab_chunk: vocabulary entries whose logits exist at once in the loss; must divide vocab; null is all
        places: replaces places of the recipe or single settings of them, e.g. {residual: {alpha_init: 0.1}}
    """

    arch: str
    width: int
    layers: int
    heads: int
    vocab: int
    context: int
    feed_forward: int | None = None
    kv_heads: int | None = None
    tied_embeddings: bool = False
    rope_theta: float = 10_000.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    scan_layers: bool = True
    remat: Literal["none", "full"] | list[str] = "none"
    attention: Literal["auto", "reference", "blocks", "xla", "cudnn", "splash"] = "auto"
    loss_vocab_chunk: int | None = None
    places: dict[str, Any] = field(default_factory=dict)

    @property
    def feed_forward_width(self) -> int:
        """F, also where feed_forward is null."""
        return 4 * self.width if self.feed_forward is None else self.feed_forward

    @property
    def key_value_heads(self) -> int:
        """G, also where kv_heads is null."""
        return self.heads if self.kv_heads is None else self.kv_heads


def phase_steps(count: int | None, fraction: float | None, steps: int) -> int:
    """Length of a phase of the schedule that is given as a count, or else as a fraction of all `steps`."""
    return count if count is not None else round((fraction or 0) * steps)


@dataclass(frozen=True)
class OptimConfig:
    """Adam, its schedule, and what the recipe may recommend.

    Args:
        peak_lr: highest learning rate of the schedule
        schedule: shape after the warm-up: cosine, wsd (constant, then linear decay) or constant
        warmup_fraction: linear warm-up, as a fraction of run.steps; null is what the recipe recommends
        warmup_steps: the same in steps; give one of the two
        decay_fraction: length of the wsd decay, as a fraction of run.steps
        decay_steps: the same in steps; overrides decay_fraction
        end_lr_fraction: learning rate at the end of cosine or wsd, as a fraction of peak_lr
        weight_decay: decoupled decay of the matrices; null is what the recipe recommends
        clip_norm: global norm that gradients are scaled down to, or none; null is what the recipe recommends
        beta1: decay of Adam's first moment
        beta2: decay of Adam's second moment
        epsilon: Adam's epsilon
        lr_factors: what the learning rate of single weights is multiplied with, by their role (embedding, query, key,
            value, attention_out, up, gate, down, head, alpha, logit_scale, …), e.g. {down: 0.25}; 0 freezes them
        micro_batches: parts of a batch that are computed one after the other, their gradients added up
        moments_dtype: dtype in which Adam's moments are kept between steps; bfloat16 halves their memory
        max_bad_steps: steps in a row whose loss or gradient is not finite after which the run ends with exit code 3;
            each is skipped: it changes neither the parameters nor the optimizer, whose schedule waits
    """

    peak_lr: float
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_fraction: float | None = None
    warmup_steps: int | None = None
    decay_fraction: float = 0.2
    decay_steps: int | None = None
    end_lr_fraction: float = 0.0
    weight_decay: float | None = None
    clip_norm: float | Literal["none"] | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    lr_factors: dict[str, float] = field(default_factory=dict)
    micro_batches: int = 1
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    max_bad_steps: int = 10


@dataclass(frozen=True)
class DataConfig:
    """Text, tokens and batches.

    Args:
        batch_size: sequences per optimizer step, over all devices
        source: a folder that prepare made, a text file or folder of text files, or stdlib (source text of the running
            Python's standard library)
        mixture: folders that prepare made and their weights, in place of source, e.g. {data/web: 0.7, data/code: 0.3}
        tokenizer: bytes, bpe (byte-level BPE of model.vocab entries trained on the training split), a tokenizer.json
            or a SentencePiece .model; null is the one that made the prepared tokens, or bytes for text
        packing: concatenate (documents behind one another, cut into windows) or best_fit (whole documents side by side)
        validation_fraction: share of the documents that is held out
        validation_tokens: tokens of the held-out documents that an evaluation reads, always the same ones
        validation_sets: further sets to evaluate on, name and source of each; their held-out documents are read
        attend_across_documents: let attention cross the boundary between two documents of one window
        shuffle_seed: seed of the order of the rows
        workers: processes that read ahead; 0 reads in threads of this one, which is enough for prepared tokens
        on_change: what a resume does if the data are other ones: refuse, or continue with them
        cache_dir: where token files are kept; null is $XDG_CACHE_HOME/angpt_jax or ~/.cache/angpt_jax
    """

    batch_size: int
    source: str = "stdlib"
    mixture: dict[str, float] = field(default_factory=dict)
    tokenizer: str | None = None
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    validation_fraction: float = 0.05
    validation_tokens: int = 131_072
    validation_sets: dict[str, str] = field(default_factory=dict)
    attend_across_documents: bool = False
    shuffle_seed: int = 0
    workers: int = 0
    on_change: Literal["refuse", "continue"] = "refuse"
    cache_dir: str | None = None


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis, and which axis of an array is split over which; one mesh axis may be -1, "all that
    are left".

    Args:
        replica: copies of the parameters; the batch is split over them. The only axis that slices of a pod may divide
        fsdp: parts that parameters and the batch are split into
        tensor: parts that heads, feed-forward width and vocabulary are split into
        context: parts that the tokens of a window are split into
        preset: what is split: data_parallel (batch), fsdp (and parameters), fsdp_tensor (and heads, feed-forward width,
            vocabulary), context (and windows)
        rules: replaces lines of the preset: axis of an array (batch, length, embed, vocab, heads, kv_heads,
            feed_forward, head_dim, layers) to a mesh axis, a list of them, or null, e.g. {vocab: null}
    """

    replica: int = 1
    fsdp: int = -1
    tensor: int = 1
    context: int = 1
    preset: Literal["data_parallel", "fsdp", "fsdp_tensor", "context"] = "fsdp_tensor"
    rules: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes of one run. On TPU pods, SLURM, GKE and Open MPI all of this is found out; a single process
    needs nothing.

    Args:
        coordinator: HOST:PORT of process 0; null is $JAX_COORDINATOR_ADDRESS, or none
        processes: how many there are; null is $JAX_NUM_PROCESSES
        process: number of this one, from 0; null is $JAX_PROCESS_ID
        connect_timeout_seconds: how long processes wait for each other at the start
        barrier_timeout_seconds: how long they wait for each other later on
        heartbeat_timeout_seconds: silence after which a process counts as dead
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    connect_timeout_seconds: int = 300
    barrier_timeout_seconds: int = 600
    heartbeat_timeout_seconds: int = 60


@dataclass(frozen=True)
class RunConfig:
    """Length, files and rhythm of a run.

    Args:
        steps: optimizer steps of the whole schedule
        dir: run directory; null is runs/ + the name of the config
        stop_at_step: stop early, with a checkpoint, while the schedule stays that of run.steps
        log_every_steps: steps between two lines of metrics
        instrument_every_steps: steps between two lines of instruments.jsonl (norms, α, updates, …); null is off
        eval_every_steps: steps between two evaluations; the last step is always evaluated
        checkpoint_every_steps: steps between two checkpoints; the last step is always saved
        keep_latest: newest checkpoints that are kept
        keep_every_steps: also keep every checkpoint whose step is a multiple of this; null keeps none of them
        seed: seed of the initial weights
        resume: auto (continue if there is a checkpoint), never (the directory must be new), must (there must be one)
        init_from: a run directory, or a folder of weights alone, whose newest weights a new run starts from, at step 0
            of its own schedule; null draws them. A run that has a checkpoint goes on from that and does not look there
    """

    steps: int
    dir: str | None = None
    stop_at_step: int | None = None
    log_every_steps: int = 10
    instrument_every_steps: int | None = None
    eval_every_steps: int = 100
    checkpoint_every_steps: int = 200
    keep_latest: int = 2
    keep_every_steps: int | None = None
    seed: int = 0
    resume: Literal["auto", "never", "must"] = "auto"
    init_from: str | None = None

    @property
    def last_step(self) -> int:
        """Where training ends."""
        return self.stop_at_step or self.steps


@dataclass(frozen=True)
class FromRun:
    """Where the model comes from that a command uses.

    Args:
        dir: run directory that holds the checkpoint, or a folder of weights alone (export --format orbax)
    """

    dir: str = "runs/default"


@dataclass(frozen=True)
class Config:
    """All of a training run.

    Args:
        model: the decoder
        optim: the optimizer
        data: text, tokens, batches
        run: length, files, rhythm
        mesh: devices
        distributed: several processes
        dry_run: print what would be trained (sizes, tables, memory of the compiled step) and stop
    """

    model: ModelConfig
    optim: OptimConfig
    data: DataConfig
    run: RunConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    dry_run: bool = False
