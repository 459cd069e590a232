"""From hidden states to logits."""

from __future__ import annotations

from torch import Tensor

from pyvllm.kernels import AnyKernels, Norm
from pyvllm.layers.linear import Linear, Normed
from pyvllm.layers.norm import NormSpec, empty_norm, norm_slots


class Head:
    """The output matrix; before it, where the model has them, a norm and a projection, after it a factor and a cap.

    Symbols: R rows of logits, V vocabulary, e size of the table's rows, d hidden size.
    """

    def __init__(
        self,
        table: Tensor,
        hidden_size: int,
        *,
        tied: bool,
        bias: bool,
        norm: NormSpec | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """`table` `[V, e]` is the embedding, which a tied head shares. `softcap`: logits become
        `softcap * tanh(logits / softcap)`.
        """
        dtype, device = table.dtype, table.device
        self._tied = tied
        self._norm_spec = norm
        self._norm: Norm | None = None
        if norm is not None:
            self._norm = empty_norm(norm, hidden_size, dtype=dtype, device=device)
        self._project: Linear | None = None
        if table.shape[1] != hidden_size:
            self._project = Linear.empty(hidden_size, table.shape[1], bias=False, dtype=dtype, device=device)
        weight = table if tied else table.new_empty(table.shape)
        self._bias = weight.new_empty(len(weight)) if bias else None
        self._linear = Linear(weight, self._bias)
        self._scale, self._softcap = scale, softcap

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name; a tied head has no matrix of its own."""
        slots = {} if self._norm_spec is None else norm_slots(self._norm_spec, final_norm=self._norm)
        if self._project is not None:
            slots |= self._project.slots("project_out")
        head = self._linear.slots("head")
        if self._tied:
            del head["head"]
        return slots | head

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        self._linear.pack(kernels)
        if self._project is not None:
            self._project.pack(kernels)

    def __call__(self, hidden: Tensor, kernels: AnyKernels) -> Tensor:
        """`[R, d]` -> `[R, V]`."""
        x = hidden if self._norm is None else Normed(hidden=hidden, norm=self._norm)
        if self._project is not None:
            x = self._project.of(x, kernels)
        logits = self._linear.of(x, kernels)
        if self._scale != 1.0:
            logits = logits.mul_(self._scale)
        if self._softcap is not None:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
