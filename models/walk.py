"""The arrays of a micro-batch as they come and go: models/dense.py and its blocks, in shapes.

Nothing is allocated or computed. A ``Ledger`` holds the arrays that live, and the methods of
``Walk`` stand beside the functions of their names: each makes and drops that function's arrays in
its order, those of callers that still hold them included. Names that begin with a layer's number
and a slash are kept for the layer's backward.
"""

import math
from typing import NamedTuple

import numpy as np

from surogate.kernels.arrays import BF16, F32
from surogate.kernels.attention_host import SCORES
from surogate.kernels.attention_mma import PADDING
from surogate.kernels.embedding import RARE
from surogate.kernels.linear import ROWS_PER_SLICE
from surogate.kernels.lm_head import default_chunk
from surogate.kernels.qk_norm_rope import BLOCKS, WARPS
from surogate.kernels.rmsnorm import backward_blocks
from surogate.kernels.widened import extra_of
from surogate.models.config import ModelConfig
from surogate.models.lora import LoraSpec, adapted
from surogate.models.names import layer_fields
from surogate.models.pool import Event
from surogate.models.stack import Recompute
from surogate.models.tree import Layer

Shape = tuple[int, ...]
INT32 = np.dtype(np.int32)


class Layout(NamedTuple):
    """How arrays lie on a kind of device."""

    compute: np.dtype  # of weights and activations
    unit: int  # bytes that an allocation is rounded up to
    host: bool  # the host versions run, with temporaries of their own

    def bytes(self, shape: Shape, dtype: np.dtype | None = None) -> int:
        """Bytes of an array; without ``dtype``, of the dtype that the device computes in."""
        size = math.prod(shape) * (dtype or self.compute).itemsize
        return -(-size // self.unit) * self.unit


CARD = Layout(BF16, 512, host=False)
HOST = Layout(F32, 1, host=True)


class Work(NamedTuple):
    """What a step computes, and in what."""

    config: ModelConfig
    lora: LoraSpec | None
    layout: Layout
    tokens: int  # of a micro-batch
    longest: int  # tokens of the longest document
    recompute: Recompute
    chunk: int | None  # tokens whose logits exist at a time; None: chosen by size
    gradient_dtype: np.dtype
    moment_dtype: np.dtype
    masters: bool  # float32 copies of what is trained
    widen: bool  # adapted weights lie in one array with their adapters


class Ledger:
    """Live arrays by name, and for each phase of a program the most bytes that lived at a time."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.arrays: dict[str, int] = {}
        self.live = 0
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self.events: list[Event] = []

    def make(self, name: str, *shape: int, dtype: np.dtype | None = None) -> None:
        """An array comes to life."""
        assert name not in self.arrays, f"{name} is alive"
        self.arrays[name] = size = self.layout.bytes(shape, dtype)
        self.live += size
        self.events.append(Event(name, size))
        self.peaks[self.phase] = max(self.live, self.peaks.get(self.phase, 0))

    def drop(self, *names: str) -> None:
        """Arrays die."""
        for name in names:
            self.live -= self.arrays.pop(name)
            self.events.append(Event(name, None))

    def drop_all(self, prefix: str) -> None:
        """Every array dies whose name begins so."""
        self.drop(*[name for name in self.arrays if name.startswith(prefix)])

    def scratch(self, *shape: int, dtype: np.dtype | None = None) -> None:
        """An array that lives within one op."""
        self.make("scratch", *shape, dtype=dtype)
        self.drop("scratch")

    def host_scratch(self, *shape: int, copies: int = 1) -> None:
        """What the host version of an op makes and a kernel does not."""
        if self.layout.host:
            self.scratch(copies, *shape)


class Matrix(NamedTuple):
    """A weight's shape and, where it has an adapter, how wide that is."""

    outer: int
    inner: int
    bias: bool
    rank: int  # of all adapted parts together; 0 without an adapter
    parts: int
    spread: bool  # whether the adapter's B is copied into a matrix of all rows
    extra: int  # rows and columns that a widened weight has more, and rows read by it columns


class Walk:
    """A ledger and what is walked through."""

    def __init__(self, work: Work) -> None:
        config = work.config
        self.work, self.ledger = work, Ledger(work.layout)
        self.tokens, self.hidden, self.layers = work.tokens, config.hidden, config.layers
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.ffn = config.ffn
        fields = layer_fields(config, 0)
        self.w_qkv = self._matrix(fields, "w_qkv", bias=config.qkv_bias)
        self.w_o = self._matrix(fields, "w_o")
        self.w_gate_up = self._matrix(fields, "w_gate_up")
        self.w_down = self._matrix(fields, "w_down")
        self.matrices = (self.w_qkv, self.w_o, self.w_gate_up, self.w_down)

    def _matrix(self, fields: Layer, name: str, *, bias: bool = False) -> Matrix:
        field = getattr(fields, name)
        parts = [] if self.work.lora is None else adapted(self.work.lora, field)
        rank = len(parts) * self.work.lora.rank if self.work.lora else 0
        whole = [part.rows for part in parts] == [(0, field.shape[0])]
        outer, inner = field.shape
        extra = extra_of(rank) if self.work.widen else 0
        return Matrix(outer, inner, bias, rank, len(parts), bool(parts) and not whole, extra)

    # The step.

    def micro(self) -> int:
        """Loss and gradients. Returns the bytes that are kept between forward and backward."""
        ledger, policy = self.ledger, self.work.recompute
        ledger.phase = "forward"
        self.hidden_fwd(policy)
        kept = ledger.live
        ledger.make("normed", self.tokens, self.hidden)
        ledger.phase = "head"
        self.head()
        ledger.drop("normed")
        ledger.phase = "backward"
        self.hidden_bwd(policy)
        self.embedding_bwd()
        ledger.drop_all("")
        return kept

    def evaluation(self) -> int:
        """Peak of a loss without gradients, which keeps nothing of a layer that is done."""
        ledger = self.ledger
        ledger.phase = "evaluation"
        self.hidden_fwd("forward")
        ledger.make("normed", self.tokens, self.hidden)
        ledger.make("logits", self.chunk(), self.work.config.vocab)
        for name in ("logprobs", "lse"):
            ledger.make(name, self.tokens, dtype=F32)
        ledger.host_scratch(self.chunk(), self.work.config.vocab, copies=3)
        ledger.drop_all("")
        return ledger.peaks["evaluation"]

    # The body. ``policy`` is the step's, or "forward" for an evaluation.

    def hidden_fwd(self, policy: str) -> None:
        """Leaves each layer's residuals, and the input and rstd of the final norm."""
        ledger, last = self.ledger, self.layers - 1
        ledger.make("0/x", self.tokens, self.hidden)
        for i in range(self.layers):
            y = f"{i + 1}/x" if i < last else "final.x"
            self.layer_fwd(i, y, keep=policy == "none")
            if policy == "block":
                ledger.drop_all(f"{i}/res.")
            elif policy == "forward":  # the caller holds the first layer's input to the end
                kept = {"0/x"}
                ledger.drop(*[n for n in ledger.arrays if n.startswith(f"{i}/") and n not in kept])
        ledger.make("final.rstd", self.tokens, dtype=F32)

    def hidden_bwd(self, policy: str) -> None:
        """The callers hold what came in, and what the final norm gave, to the end."""
        ledger, last = self.ledger, self.layers - 1
        self.rmsnorm_bwd("final.dx", self.w_down.extra)
        dy = ""
        for i in reversed(range(self.layers)):
            if policy == "block":
                self.layer_fwd(i, f"y{i}", keep=True)
                if i < last:
                    ledger.drop(f"y{i + 1}")
            self.layer_bwd(i, f"d{i}", keep=policy != "selective")
            if dy:
                ledger.drop(dy)
            dy = f"d{i}"
            ledger.drop_all(f"{i}/")

    def layer_fwd(self, i: int, y: str, *, keep: bool) -> None:
        """Makes ``y`` and the residuals, whose names begin with i/res."""
        res = f"{i}/res."
        self.attention_block_fwd(res, keep)
        self.mlp_block_fwd(res, y, keep)

    def layer_bwd(self, i: int, dx: str, *, keep: bool) -> None:
        self.mlp_block_bwd("d_mid", keep)
        self.attention_block_bwd(dx, keep, self.w_down.extra if i else 0)
        self.ledger.drop("d_mid")

    def attention_block_fwd(self, res: str, keep: bool) -> None:
        ledger = self.ledger
        self.rmsnorm_fwd(f"{res}attn_n", f"{res}attn_rstd", self.w_qkv)
        self.linear_fwd(self.w_qkv, f"{res}qkv", room=True)
        self.qk_norm_rope_fwd(res)
        self.attention_fwd(res)
        self.linear_fwd(self.w_o, f"{res}mid")
        if not keep:
            ledger.drop(f"{res}attn_n")

    def attention_block_bwd(self, dx: str, keep: bool, extra: int) -> None:
        ledger = self.ledger
        self.linear_bwd(self.w_o, "do", room=True)
        self.attention_bwd()
        self.qk_norm_rope_bwd()
        if not keep:
            self.rmsnorm_fwd("n", "rstd", self.w_qkv)
            ledger.drop("rstd")
        self.linear_bwd(self.w_qkv, "dn")
        self.rmsnorm_bwd(dx, extra)
        ledger.drop("do", "dqkv", "dn", *([] if keep else ["n"]))

    def mlp_block_fwd(self, res: str, y: str, keep: bool) -> None:
        self.rmsnorm_fwd(f"{res}mlp_n", f"{res}mlp_rstd", self.w_gate_up)
        self.linear_fwd(self.w_gate_up, f"{res}gate_up", room=True)
        self.swiglu_fwd(f"{res}a")
        self.linear_fwd(self.w_down, y, t=f"{res}down.t", room=True)
        if not keep:
            self.ledger.drop(f"{res}mlp_n", f"{res}a")

    def mlp_block_bwd(self, dx: str, keep: bool) -> None:
        ledger = self.ledger
        if not keep:
            self.swiglu_fwd("a")
        self.linear_bwd(self.w_down, "da", room=True)
        if not keep:
            ledger.drop("a")
        self.swiglu_bwd("d_both")
        ledger.drop("da")
        if not keep:
            self.rmsnorm_fwd("n", "rstd", self.w_gate_up)
            ledger.drop("rstd")
        self.linear_bwd(self.w_gate_up, "dn", room=True)
        self.rmsnorm_bwd(dx, self.w_o.extra)
        ledger.drop("d_both", "dn", *([] if keep else ["n"]))

    # The ops.

    def linear_fwd(self, w: Matrix, y: str, *, t: str | None = None, room: bool = False) -> None:
        """``room``: the input has room for what a widened weight makes of it."""
        ledger = self.ledger
        if w.extra and not room:
            ledger.make(t or f"{y}.t", self.tokens, w.extra)
        ledger.make(y, self.tokens, w.outer)
        ledger.host_scratch(self.tokens, w.outer)
        if w.rank and not w.extra:
            ledger.make(t or f"{y}.t", self.tokens, w.rank)
            if w.spread:
                ledger.scratch(w.outer, w.rank)

    def linear_bwd(self, w: Matrix, dx: str, *, room: bool = False) -> None:
        """``room``: the gradient that comes in has it."""
        ledger, tokens = self.ledger, self.tokens
        if w.extra and not room:
            ledger.make("dt", tokens, w.extra)
        if w.rank and not w.extra:
            if w.spread:
                ledger.make("spread", w.outer, w.rank)
            ledger.make("dt", tokens, w.rank)
            if w.spread:
                ledger.drop("spread")
        ledger.make(dx, tokens, w.inner)
        ledger.host_scratch(tokens, w.inner)
        if self.work.lora is None:
            ledger.host_scratch(w.outer, w.inner)
            if w.bias and not self.work.layout.host:
                ledger.scratch(-(-tokens // ROWS_PER_SLICE), w.outer, dtype=F32)
        if w.extra and w.parts > 1:
            ledger.scratch(w.outer, w.extra, dtype=F32)
        if "dt" in ledger.arrays:
            ledger.drop("dt")

    def rmsnorm_fwd(self, y: str, rstd: str, reader: Matrix) -> None:
        """``reader`` multiplies y."""
        self.ledger.make(y, self.tokens, self.hidden + reader.extra)
        self.ledger.host_scratch(self.tokens, self.hidden)
        self.ledger.make(rstd, self.tokens, dtype=F32)

    def rmsnorm_bwd(self, dx: str, extra: int) -> None:
        """``extra``: room behind each row."""
        ledger = self.ledger
        ledger.make(dx, self.tokens, self.hidden + extra)
        ledger.host_scratch(self.tokens, self.hidden, copies=3)
        if self.work.lora is None and not self.work.layout.host:
            blocks = backward_blocks(self.tokens, self.hidden, self.work.layout.compute)
            ledger.scratch(blocks, self.hidden, dtype=F32)

    def swiglu_fwd(self, y: str) -> None:
        self.ledger.make(y, self.tokens, self.ffn + self.w_down.extra)
        self.ledger.host_scratch(self.tokens, self.ffn, copies=2)

    def swiglu_bwd(self, d_gate_up: str) -> None:
        self.ledger.make(d_gate_up, self.tokens, 2 * self.ffn + self.w_gate_up.extra)
        self.ledger.host_scratch(self.tokens, self.ffn, copies=7)

    def qk_norm_rope_fwd(self, res: str) -> None:
        """Queries and keys; the values stay a view of the projection, which is kept for them."""
        ledger, heads = self.ledger, self.heads + self.kv_heads
        ledger.make(f"{res}qk", self.tokens, heads, self.head_dim)
        ledger.host_scratch(self.tokens, self.heads, self.head_dim, copies=4)

    def qk_norm_rope_bwd(self) -> None:
        """In place."""
        ledger = self.ledger
        ledger.host_scratch(self.tokens, self.heads, self.head_dim, copies=5)
        if self.work.config.qk_norm and self.work.lora is None and not self.work.layout.host:
            blocks = min(BLOCKS, -(-self.tokens // WARPS))
            ledger.scratch(2, blocks, self.head_dim, dtype=F32)

    def attention_fwd(self, res: str) -> None:
        ledger = self.ledger
        ledger.make(f"{res}o", self.tokens, self.heads, self.head_dim)
        ledger.make(f"{res}lse", self.heads, self.tokens, dtype=F32)
        self._attention_host(copies=1, scores=3)

    def attention_bwd(self) -> None:
        ledger = self.ledger
        ledger.make("dqkv", self.tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        padded = -(-self.tokens // PADDING) * PADDING
        if not self.work.layout.host:
            ledger.scratch(self.heads, padded, 2, dtype=F32)
        self._attention_host(copies=2, scores=5)

    def _attention_host(self, *, copies: int, scores: int) -> None:
        """The host version copies q, k and v by head, and has blocks of scores."""
        block = min(SCORES, self.heads * self.work.longest**2)
        packed = self.tokens * (self.heads + 2 * self.kv_heads) * self.head_dim
        self.ledger.host_scratch(copies * packed + scores * block)

    def embedding_bwd(self) -> None:
        """The order of tokens by id; with adapters the embedding is frozen."""
        if self.work.lora is not None:
            return
        ledger, vocab, tokens = self.ledger, self.work.config.vocab, self.tokens
        if self.work.layout.host:
            ledger.scratch(vocab, self.hidden)
            return
        for name in ("count", "begin"):
            ledger.make(name, vocab, dtype=INT32)
        for name in ("arrival", "rare", "placed", "order"):
            ledger.make(name, tokens, dtype=INT32)
        ledger.make("totals", 3, dtype=INT32)
        ledger.make("hot", max(1, tokens // (RARE + 1)), dtype=INT32)

    def chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        config, size = self.work.config, self.work.layout.compute.itemsize
        chosen = self.work.chunk or default_chunk(self.tokens, config.vocab, size)
        return min(self.tokens, chosen)

    def head(self) -> None:
        """Leaves the gradient of the normed hidden state, and each token's log-probability."""
        ledger, vocab, chunk = self.ledger, self.work.config.vocab, self.chunk()
        ledger.make("logits", chunk, vocab)
        ledger.make("head.dx", self.tokens, self.hidden)
        ledger.make("logprobs", self.tokens, dtype=F32)
        ledger.host_scratch(chunk, vocab, copies=4)
        if self.work.lora is None:
            ledger.host_scratch(vocab, self.hidden)
        ledger.drop("logits")
