"""From token ids to hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from pyvllm.kernels import AnyKernels, Norm
from pyvllm.layers.linear import Linear
from pyvllm.layers.norm import NormSpec, empty_norm, norm_slots
from pyvllm.step import StepView


class Embedding:
    """Rows of a table; then, where the model has them: a projection, learned positions, a factor, a norm.

    Symbols: T tokens of a step, V vocabulary, e size of the table's rows, d hidden size.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        table_size: int | None,
        num_positions: int,
        position_offset: int | None,
        scale: float,
        norm: NormSpec | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`table_size`: e if it is not d, to which a matrix projects then. `position_offset`: row of position 0 in the
        table of learned positions, None if there are none.
        """
        self.table = torch.empty(vocab_size, table_size or hidden_size, dtype=dtype, device=device)
        self._project: Linear | None = None
        if table_size is not None:
            self._project = Linear.empty(table_size, hidden_size, bias=False, dtype=dtype, device=device)
        self._positions: Tensor | None = None
        if position_offset is not None:
            shape = (position_offset + num_positions, hidden_size)
            self._positions = torch.empty(shape, dtype=dtype, device=device)
        self._position_rows = None if self._positions is None else self._positions[position_offset:]
        # As transformers does: the factor is a number of the model's dtype.
        self._scale = torch.tensor(scale).to(dtype).item()
        self._norm_spec = norm
        self._norm: Norm | None = None
        if norm is not None:
            self._norm = empty_norm(norm, hidden_size, dtype=dtype, device=device)

    def slots(self) -> dict[str, Tensor]:
        """Parameters by neutral name."""
        slots = {"embed": self.table}
        if self._positions is not None:
            slots["positions"] = self._positions
        if self._project is not None:
            slots |= self._project.slots("project_in")
        if self._norm_spec is not None:
            slots |= norm_slots(self._norm_spec, embed_norm=self._norm)
        return slots

    def pack(self, kernels: AnyKernels) -> None:
        """See `Linear.pack`."""
        if self._project is not None:
            self._project.pack(kernels)

    def __call__(self, step: StepView, previous: Tensor, kernels: AnyKernels) -> Tensor:
        """Of the step's tokens: `[T, d]`. `previous`: see `Kernels.embed`."""
        hidden = kernels.embed(step.token_ids, previous, self.table)
        if self._project is not None:
            hidden = self._project(hidden)
        if self._position_rows is not None:
            hidden = hidden.add_(kernels.embed(step.positions, previous, self._position_rows))
        if self._scale != 1.0:
            hidden = hidden.mul_(self._scale)
        return hidden if self._norm is None else kernels.norm(hidden, self._norm)
