"""One device, with the step gate."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_rlstab.core.checks import refusal
from lightning_rlstab.strategies.gate import StepGateMixin

__all__ = ["RLStabSingleDevice"]


class RLStabSingleDevice(StepGateMixin, SingleDeviceStrategy):
    """``Trainer(strategy="rlstab")``: Lightning's single-device strategy with the step gate, staging and probes.

    The device is the Trainer's (``accelerator`` and ``devices``); see
    :class:`~lightning_rlstab.strategies.gate.StepGateMixin` for the options.

    Raises:
        ValueError: If the Trainer was given more than one device.
    """

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device; Lightning sets it from the Trainer's flags."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise refusal("devices", 'be 1 with strategy "rlstab"', len(devices), 'Use "rlstab_ddp" or "rlstab_fsdp"')
        if devices:
            self._root_device = devices[0]
