"""Loss scaling: torch's GradScaler, with the two settings of Paddle's that it lacks.

`DECR_EVERY_N_NAN_OR_INF` waits for several overflows in a row before the scale is cut, and
`USE_DYNAMIC_LOSS_SCALING: false` leaves the scale alone. All counting stays on the device: nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.config.amp import AmpConfig

SMALLEST_SCALE = 1.0


class LossScaler(torch.amp.GradScaler):
    def __init__(self, device: str, amp: AmpConfig, enabled: bool, half_gradients: bool = False) -> None:
        """`half_gradients`: the weights themselves are fp16 (O3), and so are their gradients."""
        super().__init__(
            device,
            enabled=enabled,
            init_scale=amp.INIT_LOSS_SCALING,
            growth_factor=amp.INCR_RATIO,
            backoff_factor=amp.DECR_RATIO,
            growth_interval=amp.INCR_EVERY_N_STEPS,
        )
        self._dynamic = amp.USE_DYNAMIC_LOSS_SCALING
        self._cut_after = amp.DECR_EVERY_N_NAN_OR_INF
        # Below 1 a scale would throw away what it is there to save; at 0 it would never come back.
        self._floor = min(SMALLEST_SCALE, amp.INIT_LOSS_SCALING)
        self._half_gradients = half_gradients
        self._bad_in_a_row: Tensor | None = None
        self._restored_bad = 0

    def overflow(self, optimizer: Optimizer) -> Tensor:
        """Above 0 where a gradient of this update is not finite; only after `unscale_`."""
        found = list(self._found_inf_per_device(optimizer).values())
        return torch.stack(found).sum() if len(found) > 1 else found[0].clone()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if not self.is_enabled() or new_scale is not None:
            super().update(new_scale)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        if self._dynamic and self._cut_after == 1:
            super().update()
            scale.clamp_(min=self._floor)
            return
        found = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        bad = torch.stack([flag.to(scale.device) for flag in found]).sum() > 0
        growth, cut = self._growth_factor, self._backoff_factor
        # torch's kernel counts the good updates; the cut is ours, so its own is made to do nothing.
        self._backoff_factor = 1.0
        self._growth_factor = growth if self._dynamic else 1.0
        try:
            super().update()
        finally:
            self._growth_factor, self._backoff_factor = growth, cut
        if self._dynamic:
            self._cut_after_enough(scale, bad, cut)

    def _cut_after_enough(self, scale: Tensor, bad: Tensor, cut: float) -> None:
        if self._bad_in_a_row is None:
            self._bad_in_a_row = torch.full((), self._restored_bad, dtype=torch.int32, device=scale.device)
        self._bad_in_a_row.add_(1).mul_(bad)
        enough = self._bad_in_a_row >= self._cut_after
        self._bad_in_a_row.mul_(~enough)
        scale.copy_(torch.where(enough, (scale * cut).clamp(min=self._floor), scale))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state:
            state["bad_in_a_row"] = self._restored_bad if self._bad_in_a_row is None else int(self._bad_in_a_row)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The factors are the present settings'; what is restored is where the scale stands, unless it is a setting."""
        now = super().state_dict()
        if not now or not self._dynamic:
            return
        # Growth comes when the count meets the interval; one that was made shorter since must still be met.
        clean = min(state_dict["_growth_tracker"], self._growth_interval - 1)
        super().load_state_dict({**now, "scale": state_dict["scale"], "_growth_tracker": clean})
        self._restored_bad = state_dict.get("bad_in_a_row", 0)
        self._bad_in_a_row = None

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._half_gradients)
