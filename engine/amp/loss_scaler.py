"""Scales the loss for fp16: torch's GradScaler, plus two settings that Paddle has and torch lacks.

`DECR_EVERY_N_NAN_OR_INF` lowers the scale only after several overflows in a row, and
`USE_DYNAMIC_LOSS_SCALING: false` keeps the scale fixed. Counting stays on the device, so the host never waits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.config.schema import AmpConfig

SMALLEST_SCALE = 1.0


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler with the settings of AMP, which include the two of Paddle."""

    def __init__(self, device: str, amp: AmpConfig, half_gradients: bool = False) -> None:
        """`half_gradients`: the weights are fp16 (O3), so their gradients are too."""
        super().__init__(
            device,
            init_scale=amp.INIT_LOSS_SCALING,
            growth_factor=amp.INCR_RATIO,
            backoff_factor=amp.DECR_RATIO,
            growth_interval=amp.INCR_EVERY_N_STEPS,
        )
        self._dynamic = amp.USE_DYNAMIC_LOSS_SCALING
        self._backoff_after = amp.DECR_EVERY_N_NAN_OR_INF
        # Never lowered below 1: gradients would underflow more, not less, and a scale of 0 would never grow again.
        # A user may begin with a smaller scale, which is then the smallest.
        self._floor = min(SMALLEST_SCALE, amp.INIT_LOSS_SCALING)
        self._half_gradients = half_gradients
        self._overflows_in_a_row: Tensor | None = None
        """Counted on the device; None until the first update, which starts it at `_restored_overflows`"""
        self._restored_overflows = 0

    def overflow(self, optimizer: Optimizer) -> Tensor:
        """Return a number on the device, above 0 if a gradient of this update is not finite.

        It is valid only after `unscale_`.
        """
        (flag,) = self._found_inf_per_device(optimizer).values()  # one device
        return flag.clone()

    def update(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no scale is given from outside
        """Adapt the scale after an update: lower it after enough overflows in a row, raise it after good updates.

        A fixed scale stays. All is computed on the device, so the host does not wait.
        """
        scale, _ = self._check_scale_growth_tracker("update")
        if not self._dynamic:
            # Given a scale, torch sets it (here: leaves it as it is), and clears the overflow flag of this update.
            super().update(scale)
            return
        if self._backoff_after == 1:  # torch's own rule: lower the scale at each overflow
            super().update()
            scale.clamp_(min=self._floor)
            return

        # Paddle's rule: torch still counts the good updates and raises the scale. Only lowering it is done here, so
        # torch's factor for that is 1 during the call, which also clears the flag: it is read first.
        (state,) = self._per_optimizer_states.values()  # one optimiser
        (flag,) = state["found_inf_per_device"].values()  # one device
        overflowed = flag > 0
        backoff = self._backoff_factor
        self._backoff_factor = 1.0
        try:
            super().update()
        finally:
            self._backoff_factor = backoff
        if self._overflows_in_a_row is None:
            count = self._restored_overflows
            self._overflows_in_a_row = torch.full((), count, dtype=torch.int32, device=scale.device)
        self._overflows_in_a_row.add_(1).mul_(overflowed)  # one more if this update overflowed, else 0
        must_lower = self._overflows_in_a_row >= self._backoff_after
        self._overflows_in_a_row.mul_(~must_lower)  # 0 again once the scale is lowered
        lower_scale = (scale * backoff).clamp(min=self._floor)
        scale.copy_(torch.where(must_lower, lower_scale, scale))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state:
            count = self._overflows_in_a_row
            state["bad_in_a_row"] = self._restored_overflows if count is None else int(count)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scale and the counts. Factors, and a scale that is fixed, stay as the current settings say."""
        current = super().state_dict()  # empty if scaling is off
        if not current or not self._dynamic:
            return
        # The scale grows when the count equals the interval, which may be shorter now than the restored count.
        good_updates = min(state_dict["_growth_tracker"], self._growth_interval - 1)
        super().load_state_dict({**current, "scale": state_dict["scale"], "_growth_tracker": good_updates})
        self._restored_overflows = state_dict["bad_in_a_row"]
        self._overflows_in_a_row = None  # the next update makes the tensor, on the device of the scale

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._half_gradients)
