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
from surogate.kernels.qk_norm_rope import backward_blocks as rope_blocks
from surogate.kernels.quant.checkpoints import Scheme
from surogate.kernels.rmsnorm import backward_blocks
from surogate.kernels.widened import extra_of
from surogate.models.config import ModelConfig
from surogate.models.lora import LoraSpec, adapted
from surogate.models.names import layer_fields
from surogate.models.pool import Event
from surogate.models.recipe import Fp8Options, Nvfp4Settings, Precision, Storage, stored_as
from surogate.models.stack import Recompute
from surogate.models.tree import Layer
from surogate.models.walk_recipes import (
    fp8_cast,
    fp8_linear_fwd,
    nvfp4_linear_bwd,
    nvfp4_linear_fwd,
    stored_cast,
)

Shape = tuple[int, ...]
INT32, BYTE = np.dtype(np.int32), np.dtype(np.uint8)


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
    moment_dtype: np.dtype  # uint8: codes in blocks, of all but small parameters
    masters: bool  # float32 copies of what is trained
    widen: bool  # adapted weights lie in one array with their adapters
    recipe: Precision | None = None  # of the layers' matrices; None: plain bf16
    normuon: bool = False  # updates the layers' matrices
    cudnn: bool = True  # attention's backward may run in cuDNN, which takes scratch memory
    plain_evaluation: bool = False  # in bf16 products, whatever the recipe


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
    pieces: tuple[int, ...]  # rows of each tensor of a checkpoint
    fp8: Fp8Options | None = None  # products of codes; an adapter's blocks lie apart then
    nvfp4: Nvfp4Settings | None = None
    trained: bool = False
    stored: Storage | Scheme | None = None  # in codes, decoded before each product

    @property
    def room(self) -> int:
        """Columns that rows read by this weight have behind them."""
        return 0 if self.fp8 or self.nvfp4 else self.extra

    @property
    def turned(self) -> bool:
        """Whether its gradient is a product of codes."""
        fp8 = self.fp8
        return bool(fp8 and self.trained and fp8.scope.products.wgrad and fp8.scaling != "row")

    def casts_x(self, keep: bool) -> bool:
        """Whether the op that makes the input makes its codes, see Fp8Weight."""
        fp8 = self.fp8
        known = fp8 and fp8.scaling == "delayed" and fp8.scope.products.forward
        return bool(known and not (self.turned and keep))

    @property
    def casts_dy(self) -> bool:
        """Whether the op that makes the gradient of the output makes its codes."""
        fp8 = self.fp8
        known = fp8 and fp8.scaling == "delayed" and fp8.scope.products.dgrad
        return bool(known and not self.turned)


class Matrices(NamedTuple):
    """Those of a layer."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix


class Walk:
    """A ledger and what is walked through."""

    def __init__(self, work: Work) -> None:
        config = work.config
        self.work, self.ledger = work, Ledger(work.layout)
        self.tokens, self.hidden, self.layers = work.tokens, config.hidden, config.layers
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.ffn = config.ffn
        self.of = [self._matrices(layer_fields(config, i)) for i in range(config.layers)]
        self.at = self.of[0]  # those of the layer that is walked through

    def _matrices(self, fields: Layer) -> Matrices:
        bias = self.work.config.qkv_bias
        others = (self._matrix(fields, name) for name in ("w_o", "w_gate_up", "w_down"))
        return Matrices(self._matrix(fields, "w_qkv", bias=bias), *others)

    def _matrix(self, fields: Layer, name: str, *, bias: bool = False) -> Matrix:
        field = getattr(fields, name)
        parts = [] if self.work.lora is None else adapted(self.work.lora, field)
        rank = len(parts) * self.work.lora.rank if self.work.lora else 0
        whole = [part.rows for part in parts] == [(0, field.shape[0])]
        outer, inner = field.shape
        extra = extra_of(rank) if self.work.widen else 0
        recipe, config, trained = self.work.recipe, self.work.config, self.work.lora is None
        stored = stored_as(recipe, field)
        if not isinstance(recipe, Fp8Options | Nvfp4Settings):
            recipe = None
        elif not recipe.scope.covers(config, field.path):
            recipe = None
        spread = bool(parts) and not whole
        pieces = tuple(piece.stop - piece.start for piece in field.pieces)
        fp8 = recipe if isinstance(recipe, Fp8Options) else None
        nvfp4 = recipe if isinstance(recipe, Nvfp4Settings) else None
        return Matrix(
            outer, inner, bias, rank, len(parts), spread, extra, pieces, fp8, nvfp4, trained, stored
        )

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
        ledger = self.ledger
        self.rmsnorm_bwd("final.dx", self.of[-1].down.room)
        dy = ""
        for i in reversed(range(self.layers)):
            if policy == "block":
                self.layer_fwd(i, None, keep=True)
            self.layer_bwd(i, f"d{i}", keep=policy != "selective")
            if dy:
                ledger.drop(dy)
            dy = f"d{i}"
            ledger.drop_all(f"{i}/")

    def layer_fwd(self, i: int, y: str | None, *, keep: bool) -> None:
        """Makes ``y``, if it is wanted, and the residuals, whose names begin with i/res."""
        res, self.at = f"{i}/res.", self.of[i]
        self.attention_block_fwd(res, keep)
        self.mlp_block_fwd(res, y, keep)

    def layer_bwd(self, i: int, dx: str, *, keep: bool) -> None:
        self.at = self.of[i]
        self.mlp_block_bwd("d_mid", keep)
        self.attention_block_bwd(dx, keep, self.of[i - 1].down.room if i else 0)
        self.ledger.drop("d_mid")

    def attention_block_fwd(self, res: str, keep: bool) -> None:
        ledger = self.ledger
        self.input_cast(self.at.qkv, f"{res}qkv", keep)
        self.rmsnorm_fwd(f"{res}attn_n", f"{res}attn_rstd", self.at.qkv)
        self.linear_fwd(self.at.qkv, f"{res}qkv", room=True, keep=keep)
        self.qk_norm_rope_fwd(res)
        self.attention_fwd(res)
        self.linear_fwd(self.at.o, f"{res}mid")
        if not keep or self.at.qkv.turned:
            ledger.drop(f"{res}attn_n")

    def attention_block_bwd(self, dx: str, keep: bool, extra: int) -> None:
        ledger = self.ledger
        self.linear_bwd(self.at.o, "do", room=True)
        self.attention_bwd()
        self.qk_norm_rope_bwd()
        if not keep:
            self.rmsnorm_fwd("n", "rstd", self.at.qkv)
            ledger.drop("rstd")
        self.linear_bwd(self.at.qkv, "dn", keep=keep)
        self.rmsnorm_bwd(dx, extra)
        ledger.drop("do", "dqkv", "dn", *([] if keep else ["n"]))

    def mlp_block_fwd(self, res: str, y: str | None, keep: bool) -> None:
        at = self.at
        self.input_cast(at.gate_up, f"{res}gate_up", keep)
        self.rmsnorm_fwd(f"{res}mlp_n", f"{res}mlp_rstd", at.gate_up)
        self.linear_fwd(at.gate_up, f"{res}gate_up", room=True, keep=keep)
        if y is not None:
            self.input_cast(at.down, f"{res}down", keep)
        self.swiglu_fwd(f"{res}a")
        self.linear_fwd(at.down, y, at=f"{res}down", room=True, keep=keep)
        for name, reader in (("mlp_n", at.gate_up), ("a", at.down)):
            if not keep or reader.turned:
                self.ledger.drop(f"{res}{name}")

    def mlp_block_bwd(self, dx: str, keep: bool) -> None:
        ledger = self.ledger
        if not keep:
            self.swiglu_fwd("a")
        self.linear_bwd(self.at.down, "da", room=True, keep=keep)
        if not keep:
            ledger.drop("a")
        self.gradient_cast(self.at.gate_up)
        self.swiglu_bwd("d_both")
        ledger.drop("da")
        if not keep:
            self.rmsnorm_fwd("n", "rstd", self.at.gate_up)
            ledger.drop("rstd")
        self.linear_bwd(self.at.gate_up, "dn", room=True, keep=keep)
        self.rmsnorm_bwd(dx, self.at.o.room)
        ledger.drop("d_both", "dn", *([] if keep else ["n"]))

    # The ops.

    def input_cast(self, w: Matrix, at: str, keep: bool) -> None:
        """``at`` and ``keep``: of the linear_fwd whose input is made next."""
        if w.casts_x(keep):
            self.ledger.make(f"{at}.rows", self.tokens, w.inner, dtype=BYTE)

    def gradient_cast(self, w: Matrix) -> None:
        if w.casts_dy:
            self.ledger.make("dy.rows", self.tokens, w.outer, dtype=BYTE)

    def linear_fwd(
        self, w: Matrix, y: str | None, *, at: str = "", room: bool = False, keep: bool = True
    ) -> None:
        """``room``: the input has room for what a widened weight makes of it. ``keep``: residuals
        hold the input. ``at`` names residuals that are not named after y, which may be None:
        residuals alone.
        """
        ledger, t = self.ledger, f"{at or y}.t"
        if y is not None:
            stored_cast(ledger, w, backward=False)
        if w.fp8 is not None:
            fp8_linear_fwd(self, w, w.fp8, y, at or str(y), keep)
            return
        if w.nvfp4 is not None:
            nvfp4_linear_fwd(self, w, w.nvfp4, y, at or str(y))
            return
        if w.extra and not room:
            ledger.make(t, self.tokens, w.extra)
        if y is not None:
            ledger.make(y, self.tokens, w.outer)
            ledger.host_scratch(self.tokens, w.outer)
        if w.rank and not w.extra:
            ledger.make(t, self.tokens, w.rank)
            if w.spread and y is not None:
                ledger.scratch(w.outer, w.rank)

    def linear_bwd(self, w: Matrix, dx: str, *, room: bool = False, keep: bool = True) -> None:
        """``room``: the gradient that comes in has it. ``keep``: as it was forward."""
        ledger, tokens = self.ledger, self.tokens
        stored_cast(ledger, w, backward=True)
        if w.nvfp4 is not None:
            nvfp4_linear_bwd(self, w, w.nvfp4, dx)
            return
        if w.fp8 is not None:
            dgrad = w.fp8.scope.products.dgrad
            fp8_cast(ledger, "dy", tokens, w.outer, w.fp8, dgrad, w.turned)
        room = room and not w.fp8
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
        self.bias_bwd(w)
        if w.turned and not keep:
            ledger.scratch(tokens, w.inner, dtype=BYTE)
        if w.extra and w.parts > 1:
            ledger.scratch(w.outer, w.extra, dtype=F32)
        if "dt" in ledger.arrays:
            ledger.drop("dt")
        ledger.drop_all("dy.")

    def bias_bwd(self, w: Matrix) -> None:
        """Partial sums over the tokens."""
        if w.bias and self.work.lora is None and not self.work.layout.host:
            self.ledger.scratch(-(-self.tokens // ROWS_PER_SLICE), w.outer, dtype=F32)

    def rmsnorm_fwd(self, y: str, rstd: str, reader: Matrix) -> None:
        """``reader`` multiplies y."""
        self.ledger.make(y, self.tokens, self.hidden + reader.room)
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
        self.ledger.make(y, self.tokens, self.ffn + self.at.down.room)
        self.ledger.host_scratch(self.tokens, self.ffn, copies=2)

    def swiglu_bwd(self, d_gate_up: str) -> None:
        self.ledger.make(d_gate_up, self.tokens, 2 * self.ffn + self.at.gate_up.room)
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
        config = self.work.config
        if config.qk_norm and self.work.lora is None and not self.work.layout.host:
            rotary = int(self.head_dim * config.rope.partial_rotary_factor)
            heads = (self.heads, self.kv_heads, self.head_dim)
            blocks = rope_blocks(self.tokens, *heads, rotary, self.work.layout.compute)
            ledger.scratch(blocks, self.head_dim, dtype=F32)

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
