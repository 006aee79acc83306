"""The arrays of a micro-batch as they come and go: models/dense.py and its blocks, in shapes.

Each method stands beside the function of its name and makes and drops the arrays of that function in
its order. A name that starts with a layer's number and a slash is kept for that layer's backward.
"""

import math
from typing import NamedTuple

import numpy as np

from surogate.kernels.arrays import F32
from surogate.kernels.attention import PADDING
from surogate.kernels.lm_head import default_chunk
from surogate.kernels.linear import ROWS_PER_SLICE
from surogate.kernels.rmsnorm import BLOCKS
from surogate.models.memory import INT32, Ledger, Work
from surogate.models.names import layer_fields
from surogate.models.lora import adapted
from surogate.models.tree import Layer


class Matrix(NamedTuple):
    """A weight's shape and, where it has an adapter, how wide that is."""

    outer: int
    inner: int
    bias: bool
    rank: int  # of all adapted parts together; 0 without an adapter
    spread: bool  # whether the adapter's B is copied into a matrix of all rows


class Walk:
    """A ledger and what is walked through."""

    def __init__(self, work: Work) -> None:
        config = work.config
        self.work, self.ledger = work, Ledger(work.layout)
        self.tokens, self.hidden, self.layers = work.tokens, config.hidden, config.layers
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        fields = layer_fields(config, 0)
        self.w_qkv = self._matrix(fields, "w_qkv", bias=config.qkv_bias)
        self.w_o = self._matrix(fields, "w_o")
        self.w_gate_up = self._matrix(fields, "w_gate_up")
        self.w_down = self._matrix(fields, "w_down")

    def _matrix(self, fields: Layer, name: str, *, bias: bool = False) -> Matrix:
        field = getattr(fields, name)
        parts = [] if self.work.lora is None else adapted(self.work.lora, field)
        rank = len(parts) * self.work.lora.rank if self.work.lora else 0
        whole = [part.rows for part in parts] == [(0, field.shape[0])]
        return Matrix(*field.shape, bias, rank, bool(parts) and not whole)

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
        """Peak of a loss without gradients, which keeps every layer's input as "block" does."""
        ledger = self.ledger
        ledger.phase = "evaluation"
        self.hidden_fwd("block")
        ledger.make("normed", self.tokens, self.hidden)
        ledger.make("logits", self.chunk(), self.work.config.vocab)
        self.loss_rows("logprobs", "lse")
        self.cross_entropy_host()
        ledger.drop_all("")
        return ledger.peaks["evaluation"]

    # The body. ``policy`` is the step's, or "block" for an evaluation.

    def hidden_fwd(self, policy: str) -> None:
        """Leaves the layers' residuals, and the final norm's: its input and rstd."""
        ledger, tokens = self.ledger, self.tokens
        x = "0/x"
        ledger.make(x, tokens, self.hidden)
        for i in range(self.layers):
            y = f"{i + 1}/x" if i + 1 < self.layers else "last"
            self.layer_fwd(i, y, keep=policy == "none")
            if policy == "block":
                ledger.drop_all(f"{i}/res")
        ledger.make("last_rstd", tokens, dtype=F32)

    def hidden_bwd(self, policy: str) -> None:
        """From "d_normed" to "dx". Callers still hold what came in, so it lives to the end."""
        ledger = self.ledger
        self.rmsnorm_bwd("d_last")
        dy = "d_last"
        for i in reversed(range(self.layers)):
            if policy == "block":
                self.layer_fwd(i, f"{i}/y", keep=True)
            self.layer_bwd(i, f"d{i}", keep=policy != "selective")
            if i + 1 < self.layers:
                ledger.drop(dy)
            dy = f"d{i}"
            ledger.drop_all(f"{i}/")

    def layer_fwd(self, i: int, y: str, *, keep: bool) -> None:
        """Makes ``y``, "i/mid" (between the blocks) and the residuals "i/res..."."""
        self.attention_block_fwd(f"{i}/res", keep)
        self.mlp_block_fwd(f"{i}/res", y, keep)

    def attention_block_fwd(self, res: str, keep: bool) -> None:
        ledger, tokens = self.ledger, self.tokens
        self.rmsnorm_fwd(f"{res}.n", f"{res}.rstd")
        self.linear_fwd(self.w_qkv, f"{res}.qkv", f"{res}.qkv_t")
        self.qk_norm_rope_fwd(res)
        ledger.make(f"{res}.o", tokens, self.heads, self.head_dim)
        ledger.make(f"{res}.lse", self.heads, tokens, dtype=F32)
        self.linear_fwd(self.w_o, f"{res}.mid", f"{res}.o_t")
        if not keep:
            ledger.drop(f"{res}.n")
