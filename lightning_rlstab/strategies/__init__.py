"""Strategies whose optimizer steps pass a gate: ``"rlstab"``, ``"rlstab_ddp"`` and ``"rlstab_fsdp"``.

Importing this package registers the three names, so that ``Trainer(strategy="rlstab_fsdp")`` and YAML files know them.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlstab.strategies.ddp import RLStabDDP
from lightning_rlstab.strategies.fsdp import RLStabFSDP
from lightning_rlstab.strategies.gate import StepGateMixin
from lightning_rlstab.strategies.single_device import RLStabSingleDevice
from lightning_rlstab.strategies.verdict import RunStopped

__all__ = ["RLStabDDP", "RLStabFSDP", "RLStabSingleDevice", "RunStopped", "StepGateMixin"]

for _name, _strategy, _description in (
    ("rlstab", RLStabSingleDevice, "One device, with the step gate"),
    ("rlstab_ddp", RLStabDDP, "Data parallel with whole weights, with the step gate"),
    ("rlstab_fsdp", RLStabFSDP, "Fully sharded data parallel (FSDP2), with the step gate"),
):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, _strategy, description=_description)
