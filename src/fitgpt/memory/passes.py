"""What our model's passes allocate and free: forward with what each level keeps, the loss in pieces, backward.

As engine/model.py and engine/block.py have it, in their order and under their names.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config.memory_savers import KEEPS
from .attention import attend, attend_backward
from .eager import SIMPLE_EMBEDDING
from .optimizers import Held
from .parts import SCALAR, Parts

VECTORS = ("weight", "bias")
MOST_PIECES = 64  # of the loss, that are written one by one


class Passes(Parts):
    """Gradients go where `sink` says: into `.grad` ("grad"), to the host ("host"), or into the weights ("step")."""

    sink = "grad"
    positions = 0    # rows of the position table
    optimizer: Held  # that takes them where they are applied at once

    # ---- forward

    def embed(self, idx: str) -> None:
        """Leaves `0.x`, and `mask` where there is dropout."""
        w, s = self.w, self.s
        nbytes = s.n * s.c
        copied = self.copies(idx)
        if copied:
            w.alloc("idx", "data", 8 * s.n)
        w.alloc("tokens", "activations", s.matrix * nbytes)
        if copied:
            w.free("idx")
        x = w.alloc("embedded" if s.widens or s.dropout else "0.x", "activations", s.matrix * nbytes)
        w.free("tokens")
        if s.widens:
            w.alloc("0.x" if not s.dropout else "embedded.cast", "activations", s.residual * nbytes)
            w.free(x)
            x = "embedded.cast"
        if s.dropout:
            w.alloc("mask", "activations", nbytes)
            w.alloc("0.x", "activations", s.residual * nbytes)
            w.free(x)

    def copies(self, idx: str) -> bool:
        """Whether inputs [B, T], a window of the batch [B, T + 1], are made contiguous. One sequence is so already, and
        the places of CUDA graphs are."""
        return self.s.b > 1 and not idx.endswith(".place")

    def forward(self, layer: int, level: str | None) -> None:
        """From `{layer}.x` to the next one's; without a level nothing is kept, not even the input."""
        w, s, p = self.w, self.s, f"{layer}."
        keeps = KEEPS[level] if level else frozenset()
        matrix, nbytes = s.c * s.c, s.product * s.n * s.c
        self.norm(f"{p}h1", f"{p}x")
        self.product(f"{p}qkv", f"{p}c_attn", 3 * matrix, 3 * nbytes, bias=3 * s.c if s.bias else 0)
        self.drop_unless("h1", keeps, p)
        state = attend(self.w, self.s, p)
        self.drop_unless("qkv", keeps, p)
        self.dropped_product(f"{p}proj", f"{p}attn_proj", matrix)
        if "att" not in keeps:
            w.free(*reversed(state), f"{p}att")
        self.norm_of_sum(f"{p}h2", f"{p}x")
        self.product(f"{p}fc", f"{p}c_fc", 4 * matrix, 4 * nbytes, bias=4 * s.c if s.bias else 0)
        self.drop_unless("h2", keeps, p)
        w.alloc(f"{p}g", "activations", 4 * nbytes)
        self.drop_unless("fc", keeps, p)
        self.dropped_product(f"{p}down", f"{p}mlp_proj", 4 * matrix)
        self.drop_unless("g", keeps, p)
        self.add_both(f"{layer + 1}.x")
        self.drop_unless("proj", keeps, p)
        w.free(f"{p}down")
        if level is None:
            w.free(f"{p}x")

    def drop_unless(self, name: str, keeps: frozenset[str], prefix: str) -> None:
        if name not in keeps:
            self.w.free(prefix + name)

    def dropped_product(self, out: str, weight: str, numbers: int) -> None:
        """A product of width C, and in training its dropout, which leaves a mask of a byte a number."""
        w, s = self.w, self.s
        nbytes, bias = s.product * s.n * s.c, s.c if s.bias else 0
        if not s.dropout:
            self.product(out, weight, numbers, nbytes, bias=bias)
            return
        self.product("undropped", weight, numbers, nbytes, bias=bias)
        w.alloc(f"{out}.mask", "activations", s.n * s.c)
        w.alloc(out, "activations", nbytes)
        w.free("undropped")

    def drop_again(self, out: str) -> str:
        """A tensor of width C under the mask of the forward pass: multiplied twice."""
        w, nbytes = self.w, self.s.product * self.s.n * self.s.c
        w.alloc("masked", "activations", nbytes)
        w.alloc(out, "activations", nbytes)
        w.free("masked")
        return out

    def hidden_losses(self, idx: str, out: str) -> None:
        """token_losses: forward without gradients, then each token's loss, a piece of logits at a time."""
        w, s = self.w, self.s
        self.embed(idx)
        for layer in range(s.layers):
            self.forward(layer, None)
        self.norm("hidden", f"{s.layers}.x")
        w.free(f"{s.layers}.x")
        copied = self.copies(idx)
        if copied:
            w.alloc("targets", "data", 8 * s.n)
        head = self.cast("wte", s.vocab * s.c)
        w.alloc("logits", "logits", s.product * s.piece * s.vocab)
        w.alloc(out, "other", 4 * s.n)
        self.wake_cublas()
        for rows in self.pieces():
            self.cross_entropy(rows, gradient=False)
        w.free(*([head] if head else []), "logits")
        if copied:
            w.free("targets")
        w.free("hidden")

    def pieces(self) -> list[int]:
        """Rows of each piece of the loss. Whole pieces repeat what the one before did: of many, a few are written."""
        s = self.s
        whole, last = divmod(s.n, s.piece)
        return [s.piece] * min(whole, MOST_PIECES) + ([last] if last else [])

    # ---- training

    def accumulate(self, idx: str, levels: Sequence[str], loss: str) -> None:
        """One micro-step: forward, loss, backward. Leaves the loss, and the gradients where they go."""
        w, s = self.w, self.s
        self.embed(idx)
        for layer in range(s.layers):
            self.forward(layer, levels[layer])
        copied = self.copies(idx)
        if copied:
            w.alloc("targets", "data", 8 * s.n)
        self.head_backward(loss, copied)
        w.free(f"{s.layers}.x")
        for layer in reversed(range(s.layers)):
            self.backward(layer, levels[layer])
        self.embed_backward(idx)
        w.free(*(["mask"] if s.dropout else []), "d_x", *([self.rounded] if self.rounded != "d_x" else []))

    def head_backward(self, loss: str, copied: bool) -> None:
        w, s = self.w, self.s
        self.norm("hidden", f"{s.layers}.x")
        head = self.cast("wte", s.vocab * s.c)
        w.alloc("counted", "other", s.n)
        w.alloc("count", "other", 8)
        w.free(w.alloc("count scratch", "workspace", 8 * s.n), "counted")
        w.alloc("a token", "other", SCALAR)
        w.free("count")
        w.alloc("logits", "logits", s.product * s.piece * s.vocab)
        w.alloc("total", "other", SCALAR)
        self.wake_cublas()
        for rows in self.pieces():
            self.cross_entropy(rows, gradient=True)
            self.give_product("wte", s.vocab * s.c)
        w.alloc(loss, "other", SCALAR)
        w.free(*([head] if head else []), "a token", "total", "logits")
        w.alloc("d_x", "activations", s.residual * s.n * s.c)
        vectors = self.vectors("ln_f")
        self.rounded = self.norm_backward("d_x.rounded", f"{s.layers}.x", added=False, vectors=vectors)
        if copied:
            w.free("targets")
        w.free("hidden")
        self.drop_fresh(*vectors)

    def backward(self, layer: int, level: str) -> None:
        """From the gradient of the block's output to that of its input, computing again what was not kept."""
        w, s, p = self.w, self.s, f"{layer}."
        keeps, matrix, nbytes = KEEPS[level], s.c * s.c, s.product * s.n * s.c
        h1 = "h1" in keeps
        if "att" not in keeps:
            h1 = self.again_qkv(p, keeps)
            state = attend(self.w, self.s, p)
        else:
            state = self.state_names(p)
        if "proj" not in keeps:
            self.product("undropped" if s.dropout else f"{p}proj", f"{p}attn_proj", matrix, nbytes,
                         bias=s.c if s.bias else 0)
            if s.dropout:
                self.drop_again(f"{p}proj")
                w.free("undropped")
        h2 = "h2" in keeps
        if "fc" not in keeps:
            if not h2:
                self.norm_of_sum(f"{p}h2", f"{p}x")
            h2 = True
            self.product(f"{p}fc", f"{p}c_fc", 4 * matrix, 4 * nbytes, bias=4 * s.c if s.bias else 0)
        if s.dropout:
            self.drop_again("d_down")
        self.product("d_fc", f"{p}mlp_proj", 4 * matrix, 4 * nbytes)
        self.give_linear(f"{p}mlp_proj", 4 * matrix, s.c)
        w.free(*(["d_down"] if s.dropout else []), f"{p}fc", *([f"{p}g"] if "g" in keeps else []))
        self.product("d_h2", f"{p}c_fc", 4 * matrix, nbytes)
        ln_2 = self.vectors(f"{p}ln_2")
        d_proj = self.norm_backward("d_proj", f"{p}x", added=True, vectors=ln_2, again="" if h2 else f"{p}h2")
        w.free("d_h2", f"{p}proj")
        self.give_linear(f"{p}c_fc", 4 * matrix, 4 * s.c)
        w.free(f"{p}h2", "d_fc")
        if s.dropout:
            self.drop_again("d_proj.dropped")
            if d_proj != "d_x":
                w.free(d_proj)
            d_proj = "d_proj.dropped"
        self.product("d_att", f"{p}attn_proj", matrix, nbytes)
        self.give_linear(f"{p}attn_proj", matrix, s.c)
        if d_proj != "d_x":
            w.free(d_proj)
        if not w.alive(f"{p}qkv"):
            h1 = self.again_qkv(p, keeps)
        attend_backward(w, s, "d_qkv")
        w.free("d_att", f"{p}qkv", *reversed(state), f"{p}att")
        self.product("d_h1", f"{p}c_attn", 3 * matrix, nbytes)
        ln_1, before = self.vectors(f"{p}ln_1"), self.rounded
        self.rounded = self.norm_backward(f"{p}d_x.rounded", f"{p}x", added=False, vectors=ln_1,
                                          again="" if h1 else f"{p}h1")
        self.drop_fresh(*ln_2)
        w.free("d_h1")
        self.give_linear(f"{p}c_attn", 3 * matrix, 3 * s.c)
        w.free(f"{p}h1", "d_qkv", *([f"{p}proj.mask", f"{p}down.mask"] if s.dropout else []), f"{p}x")
        self.drop_fresh(*ln_1)
        if before != "d_x":
            w.free(before)

    def state_names(self, prefix: str) -> list[str]:
        return [name for name in (f"{prefix}{part}" for part in ("lse", "seed", "offset", "att.mask"))
                if self.w.alive(name)]

    def again_qkv(self, prefix: str, keeps: frozenset[str]) -> bool:
        """qkv, computed again where it was not kept; whether h1 is there too."""
        s = self.s
        if "qkv" in keeps:
            return "h1" in keeps
        self.norm(f"{prefix}h1", f"{prefix}x")
        self.product(f"{prefix}qkv", f"{prefix}c_attn", 3 * s.c * s.c, 3 * s.product * s.n * s.c,
                     bias=3 * s.c if s.bias else 0)
        return True

    def embed_backward(self, idx: str) -> None:
        w, s = self.w, self.s
        copied = self.copies(idx)
        if s.dropout:
            for each in ("d_x.masked", "d_x.dropped"):
                w.alloc(each, "activations", s.residual * s.n * s.c)
            w.free("d_x.masked")
        if copied:
            w.alloc("idx", "data", 8 * s.n)
        self.give_rows("wte", s.vocab, s.n, cast=s.widens)
        if copied:
            w.free("idx")
        w.alloc("positions", "data", 8 * s.t)
        w.alloc("d_positions", "activations", 4 * s.t * s.c)
        self.give_rows("wpe", self.positions, s.t, cast=s.matrix < 4)
        w.free("d_positions", *(["d_x.dropped"] if s.dropout else []), "positions")

    # ---- where gradients go

    def vectors(self, norm: str) -> tuple[str, ...]:
        """The names of a norm's gradients; a fused kernel makes them as one tensor."""
        both = self.s.bias and not self.s.compiled
        return tuple(self.fresh(f"{norm}.{part}") for part in VECTORS[:2 if both else 1])

    def fresh(self, parameter: str) -> str:
        """The first gradient of a step becomes the parameter's own; a later one is added to it and dropped."""
        own = f"{parameter}.grad"
        return f"{parameter}.fresh" if self.sink != "grad" or self.w.alive(own) else own

    def drop_fresh(self, *names: str) -> None:
        self.w.free(*(name for name in names if name.endswith(".fresh")))

    def give_product(self, parameter: str, numbers: int) -> None:
        """On CUDA a product is added straight to what is there already, if the two precisions allow it."""
        w, s, grad = self.w, self.s, f"{parameter}.grad"
        if self.sink == "host":
            w.free(w.alloc(f"{parameter}.fresh", "gradients", 4 * numbers))
            return
        waits = self.sink == "grad" or parameter == "wte"  # the token table's gradient waits for the embedding's
        there = w.alive(grad)
        new = grad if waits and not there else f"{parameter}.fresh"
        apart = s.matrix < 4 and s.casts  # bfloat16 weights, products in another precision
        if apart:
            w.alloc(f"{parameter}.product", "gradients", s.product * numbers)
        if not there or self.sink == "step":
            w.alloc(new, "gradients", s.matrix * numbers)
        if apart:
            w.free(f"{parameter}.product")
        if not waits:
            self.optimizer.apply(parameter, numbers)
        if w.alive(f"{parameter}.fresh"):
            w.free(f"{parameter}.fresh")

    def give_linear(self, weight: str, numbers: int, outputs: int) -> None:
        w, s = self.w, self.s
        self.give_product(weight, numbers)
        if s.bias:
            w.alloc("ones", "activations", s.product * s.n)
            bias = w.alloc(self.fresh(f"{weight}.bias"), "gradients", 4 * outputs)
            w.free("ones")
            self.drop_fresh(bias)

    def give_rows(self, table: str, rows: int, indices: int, *, cast: bool) -> None:
        """Rows of a table's gradient, `indices` of them, `cast` to its precision first."""
        w, s = self.w, self.s
        if self.sink == "host":
            return
        grad, nbytes = f"{table}.grad", s.matrix * rows * s.c
        total = f"{table}.rows" if self.sink == "step" else grad
        if not w.alive(total):
            w.alloc(total, "gradients", nbytes)
        if cast:
            w.alloc("rows.cast", "casts", s.matrix * indices * s.c)
        if s.matrix < 4:
            self._summed_rows(rows, indices)
        if cast:
            w.free("rows.cast")
        if s.matrix < 4:
            w.free("rows.sum")
        if self.sink == "step":
            waiting = w.alive(grad)
            if waiting:
                w.free(total)
            self.optimizer.apply(table, rows * s.c)
            w.free(grad if waiting else total)

    def _summed_rows(self, rows: int, indices: int) -> None:
        """torch's embedding backward: many indices are sorted, and sums of ten rows of equal ones kept apart."""
        w, c = self.w, self.s.c
        scratch = []
        if indices > SIMPLE_EMBEDDING:
            scratch = [w.alloc(f"rows.{part}", "workspace", 8 * indices) for part in ("sorted", "order")]
        w.alloc("rows.sum", "gradients", self.s.matrix * rows * c)
        if indices > SIMPLE_EMBEDDING:
            partial = indices // 10 + min(indices, rows)
            scratch += [w.alloc(f"rows.{part}", "workspace", 8 * indices)
                        for part in ("segments", "partials", "partial offsets")]
            scratch.append(w.alloc("rows.offsets", "workspace", 8 * partial))
            scratch.append(w.alloc("rows.sums", "workspace", 4 * partial * c))
        w.free(*reversed(scratch))
