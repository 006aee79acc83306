"""What a model is: sizes, rotary embedding and attention windows, read from a config.json.

``from_hf`` takes the dictionary of a config.json, as transformers 4 wrote it (``rope_theta`` and
``rope_scaling``) or as transformers 5 does (``rope_parameters``), and either understands every
field that changes the computation or refuses it by name. Fields that do not (token ids, cache
settings, versions) are kept in ``raw`` and written back with the weights.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from surogate.kernels.quant.checkpoints import Scheme, scheme_of
from surogate.models.tree import Layer, Model

ARCHITECTURES = ("llama", "qwen2", "qwen3")
DTYPES = ("bfloat16", "float16", "float32")
MOST_LAYERS = 10_000  # no model has as many: every layer is listed before weights are looked at
QUANTIZED = "hf_quant_config.json"  # Model-Optimizer's, beside a config.json that is silent

# Keys of a rope dictionary beside rope_type and rope_theta: what a kind needs, what it may have.
ROPE_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            "original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
            "mscale_all_dim truncate".split()
        ),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: how the frequencies base^(-2i / rotary dim) are scaled.

    Attributes:
        kind: default, linear, dynamic, yarn or llama3.
        base: rope_theta.
        factor: by how much the kind extends the context.
        low_freq_factor, high_freq_factor: limits of llama3's interpolated band, in turns over
            ``original_max_positions``.
        original_max_positions: positions that the unscaled model was trained on; dynamic scales
            with the length of a sequence over it.
        beta_fast, beta_slow: limits of yarn's ramp, in turns over ``original_max_positions``.
        attention_factor: yarn's factor on cos and sin; None: derived from factor and the mscales.
        mscale, mscale_all_dim: yarn's alternatives to ``attention_factor``.
        truncate: whether yarn's ramp starts and ends at whole dimensions.
        partial_rotary_factor: share of head_dim that is rotated.
    """

    kind: str
    base: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's parameters and computation.

    Attributes:
        architecture: llama, qwen2 or qwen3.
        layers, heads, kv_heads: counts; ``ffn`` is the width of the MLP.
        eps: of every RMSNorm.
        qk_norm: RMSNorm of q and k per head; qkv_bias: biases on q, k and v.
        tied: the embedding is also the output matrix.
        windows: per layer, how many keys a query sees, itself included; None: all before it.
        max_positions: longest sequence that the model is made for.
        torch_dtype: dtype that the checkpoint declares, if it does.
        quantized: how the checkpoint's matrices are quantised; None: they are not.
        raw: the config.json, kept for writing back.
    """

    architecture: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool
    qkv_bias: bool
    tied: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    max_positions: int
    initializer_range: float = 0.02
    torch_dtype: str | None = None
    quantized: Scheme | None = None
    raw: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def q_rows(self) -> int:
        """Rows of the q projection."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the k projection, and of the v projection."""
        return self.kv_heads * self.head_dim


def nearest(name: str, known: Iterable[str]) -> str:
    """ ", did you mean X?" for the closest of ``known``, or the whole list when none is close."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if close:
        return f", did you mean {by_lower[close[0]]}?"
    return f"; known: {', '.join(by_lower.values())}"


def read_config(directory: str | Path) -> ModelConfig:
    """Reads config.json of a checkpoint directory. Raises ValueError with one line.

    An hf_quant_config.json beside it is read as its quantization_config, should it have none.
    """
    path, quantized = Path(directory) / "config.json", Path(directory) / QUANTIZED
    raw = _read_object(path)
    if raw.get("quantization_config") is None and quantized.exists():
        found = _read_object(quantized).get("quantization")
        if not isinstance(found, dict):
            raise ValueError(f"{quantized}: has no object called quantization")
        raw["quantization_config"] = found | {"quant_method": "modelopt"}
    try:
        return from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    directory = path.parent
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        kind = "has no config.json" if Path(directory).is_dir() else "does not exist"
        raise ValueError(f"{directory}: {kind}; give a model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(raw).__name__}")
    return raw


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a config.json describes.

    Raises:
        ValueError: one line that names the field which is missing, malformed or not supported.
    """
    raw = dict(raw)
    architecture = raw.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"model_type {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(raw)
    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads if architecture == "llama" else None)
    if heads % kv_heads:
        _refuse("num_attention_heads", heads, f"must be a multiple of {kv_heads} key-value heads")
    layers = _size(raw, "num_hidden_layers", most=MOST_LAYERS)
    max_positions = _size(raw, "max_position_embeddings")
    quantized = scheme_of(raw)
    return ModelConfig(
        architecture=architecture,
        vocab=_size(raw, "vocab_size"),
        hidden=hidden,
        ffn=_size(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(raw, architecture, hidden, heads),
        eps=_number(raw, "rms_norm_eps", 1e-6),
        qk_norm=architecture == "qwen3",
        qkv_bias=architecture == "qwen2",
        tied=_flag(raw, "tie_word_embeddings"),
        rope=_rope(raw, max_positions),
        windows=_windows(raw, architecture, layers),
        max_positions=max_positions,
        initializer_range=_number(raw, "initializer_range", 0.02),
        torch_dtype=_torch_dtype(raw) or ("bfloat16" if quantized else None),
        quantized=quantized,
        raw=raw,
    )


def unquantized(config: ModelConfig) -> ModelConfig:
    """The configuration of the same model with plain weights."""
    keys = config.raw.keys() - {"quantization_config", "quantization"}
    return from_hf({key: value for key, value in config.raw.items() if key in keys})


def _refuse(field: str, value: Any, must: str) -> NoReturn:
    raise ValueError(f"{field} {value!r} {must}")


def _size(
    raw: Mapping[str, Any], field: str, default: int | None = None, *, most: int = 2**31 - 1
) -> int:
    value = default if raw.get(field) is None else raw[field]
    if value is None:
        raise ValueError(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(field, value, "must be a positive whole number")
    if value > most:
        _refuse(field, value, f"must be at most {most}")
    return value


def _number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = default if raw.get(field) is None else raw[field]
    if value is None:
        raise ValueError(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        _refuse(field, value, "must be a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], field: str, default: bool = False) -> bool:
    value = default if raw.get(field) is None else raw[field]
    if not isinstance(value, bool):
        _refuse(field, value, "must be true or false")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Names the first field that asks for a computation which these models do not have."""
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            _refuse(field, raw[field], f"is not supported for {raw['model_type']}; must be false")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        _refuse("hidden_act", activation, "is not supported; must be 'silu'")
    if raw.get("original_max_position_embeddings") is not None:
        raise ValueError("original_max_position_embeddings must be inside rope_scaling")
    if raw.get("attention_dropout"):
        _refuse("attention_dropout", raw["attention_dropout"], "is not supported; must be 0")


def _head_dim(raw: Mapping[str, Any], architecture: str, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and architecture != "qwen3" and hidden % heads:
        _refuse("hidden_size", hidden, f"must be a multiple of num_attention_heads {heads}")
    # transformers' Qwen3 has 128 where the file is silent, whatever hidden_size / heads is.
    head_dim = _size(raw, "head_dim", 128 if architecture == "qwen3" else hidden // heads)
    if head_dim % 2:
        _refuse("head_dim", head_dim, "must be even, for the rotary embedding")
    return head_dim


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Qwen: layers named sliding_attention, or else those from max_window_layers on, slide.

    use_sliding_window must be true for any of them to. Llama has no windows.
    """
    if architecture == "llama":
        return (None,) * layers
    window = None
    if _flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None:
        window = _size(raw, "sliding_window")
    kinds = raw.get("layer_types")
    if kinds is None:
        if window is None:
            return (None,) * layers
        first = raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            _refuse("max_window_layers", first, "must be a whole number")
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        _refuse("layer_types", kinds, f"must be a list of num_hidden_layers = {layers} names")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            _refuse("layer_types", kind, "is not full_attention or sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise ValueError(
                "layer_types names sliding_attention, but use_sliding_window is not true or "
                "sliding_window is missing"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _torch_dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        _refuse("torch_dtype", value, f"is not supported; must be one of {', '.join(DTYPES)}")
    return name


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Reads rope_scaling or rope_parameters. As in transformers, what they hold comes first,
    fields of the file beside them second."""
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    keys = raw.get(field) or {}
    if not isinstance(keys, dict):
        _refuse(field, keys, "must be an object")
    if keys.get("partial_rotary_factor") is None:
        keys = keys | {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    base = _number(raw, "rope_theta", 10000.0)
    rope = parse_rope(keys, field=field, base=base, max_positions=max_positions)
    if rope.partial_rotary_factor != 1:
        _refuse("partial_rotary_factor", rope.partial_rotary_factor, "is not supported; must be 1")
    return rope


def parse_rope(
    keys: Mapping[str, Any], *, field: str, base: float, max_positions: int
) -> RopeConfig:
    """A rope dictionary; ``field`` names it in errors, the rest are its defaults.

    ``max_positions`` stands for original_max_position_embeddings where that is absent. Raises
    ValueError for a kind or key that is not known, and for a key that the kind needs.
    """
    keys = {key: value for key, value in keys.items() if value is not None}
    kind = keys.pop("rope_type", None) or keys.get("type", "default")
    keys.pop("type", None)
    if str(kind) not in ROPE_KEYS:
        known_kinds = nearest(str(kind), ROPE_KEYS)
        raise ValueError(f"{field}: rope_type {kind!r} is not supported{known_kinds}")
    needed, optional = ROPE_KEYS[kind]
    known = needed | optional | {"rope_theta", "partial_rotary_factor"}
    for key in keys:
        if key not in known:
            raise ValueError(
                f"{field}: {key} is not a key of rope_type {kind}{nearest(key, known)}"
            )
    for key in sorted(needed - keys.keys()):
        raise ValueError(f"{field}: rope_type {kind} needs {key}")
    numbers = {key: _number(keys, key) for key in keys if key != "truncate"}
    factor = numbers.get("factor", 1.0)
    if factor < 1:
        _refuse(f"{field}: factor", factor, "must be at least 1")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ValueError(f"{field}: low_freq_factor must be less than high_freq_factor")
    if numbers.get("partial_rotary_factor", 1.0) > 1:
        _refuse(f"{field}: partial_rotary_factor", numbers["partial_rotary_factor"], "exceeds 1")
    original = numbers.pop("original_max_position_embeddings", max_positions)
    base = numbers.pop("rope_theta", base)
    truncate = _flag(keys, "truncate", True)
    return RopeConfig(
        kind=kind, base=base, original_max_positions=int(original), truncate=truncate, **numbers
    )


def with_rope_scaling(
    config: ModelConfig, scaling: Mapping[str, Any] | str, max_model_len: int | None = None
) -> ModelConfig:
    """The same model with another scaling of its rotary embedding, for longer sequences.

    ``scaling`` is a dictionary as in a config.json (or its JSON text), or the name linear, dynamic
    or yarn, whose factor is then ``max_model_len`` over the positions that the model was trained
    on. ``dynamic`` rescales by the length of each sequence, measured against the trained positions,
    so that it leaves ``max_positions`` alone; the others set it. ``raw`` changes along.

    Raises:
        ValueError: an unknown kind or key, or a length that the factor does not reach.
    """
    keys = _scaling_keys(scaling)
    kind = keys.setdefault("rope_type", keys.pop("type", None))
    if str(kind) not in ROPE_KEYS:
        raise ValueError(f"rope_scaling {kind!r} is not a kind{nearest(str(kind), ROPE_KEYS)}")
    trained = (config.rope.kind == "yarn" and config.rope.original_max_positions) or (
        config.max_positions
    )
    if "factor" in ROPE_KEYS[kind][0] and keys.get("factor") is None:
        if max_model_len is None:
            raise ValueError(f"rope_scaling {kind} needs max_model_len, or a factor")
        if max_model_len <= trained:
            raise ValueError(
                f"max_model_len {max_model_len} is within the {trained} positions that the model "
                "was trained on: leave rope_scaling out"
            )
        keys["factor"] = max_model_len / trained
    if kind in ("yarn", "llama3"):
        keys.setdefault("original_max_position_embeddings", trained)
    rope = parse_rope(keys, field="rope_scaling", base=config.rope.base, max_positions=trained)
    reach = round(rope.original_max_positions * rope.factor)
    if kind != "dynamic" and max_model_len is not None and max_model_len > reach:
        raise ValueError(
            f"rope_scaling: factor {rope.factor:g} extends {rope.original_max_positions} positions "
            f"to {reach}, less than max_model_len {max_model_len}"
        )
    positions = trained if kind == "dynamic" else max_model_len or reach
    raw = config.raw | {"max_position_embeddings": positions}
    if raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw["rope_parameters"] = {"rope_theta": rope.base} | keys
    else:
        raw["rope_scaling"] = keys
        raw["rope_theta"] = rope.base
    return from_hf(raw)


def _scaling_keys(scaling: Mapping[str, Any] | str) -> dict[str, Any]:
    if not isinstance(scaling, str):
        return dict(scaling)
    if not scaling.lstrip().startswith("{"):
        return {"rope_type": scaling.strip()}
    try:
        return json.loads(scaling)
    except json.JSONDecodeError as error:
        raise ValueError(f"rope_scaling: not a JSON object: {error}") from None


def parameter_shapes(config: ModelConfig) -> Model:
    """The shape of every parameter, as a tree with shapes for leaves; allocates nothing."""
    hidden, q_rows = (config.hidden,), config.q_rows
    qkv_rows = q_rows + 2 * config.kv_rows
    head_dim = (config.head_dim,) if config.qk_norm else None
    layer: list[Any] = [
        hidden,
        (qkv_rows, config.hidden),
        (qkv_rows,) if config.qkv_bias else None,
        head_dim,
        head_dim,
        (config.hidden, q_rows),
        hidden,
        (2 * config.ffn, config.hidden),
        (config.hidden, config.ffn),
    ]
    embed: Any = (config.vocab, config.hidden)
    layers = (Layer(*layer),) * config.layers
    norm: Any = hidden
    return Model(embed, layers, norm, None if config.tied else embed)


def count(config: ModelConfig) -> int:
    """Number of parameters; a tied embedding counts once."""
    embed, layers, norm, head = parameter_shapes(config)
    shapes = [embed, norm, head, *(shape for layer in layers for shape in layer)]
    return sum(math.prod(shape) for shape in shapes if shape is not None)
