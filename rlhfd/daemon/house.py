"""What every part of the daemon is handed: one epoch's state directory, database, settings, children, devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfd.config import Settings
from rlhfd.core.placement import Device
from rlhfd.core.types import Epoch
from rlhfd.daemon.statedir import StateDir
from rlhfd.pipeline.nursery import Nursery
from rlhfd.store.db import Database


@dataclass(frozen=True, kw_only=True, slots=True)
class House:
    """One epoch. `inventory` reads the devices afresh: what others use changes."""

    state: StateDir
    db: Database
    settings: Settings
    epoch: Epoch
    nursery: Nursery
    cache: Path  # converted and downloaded models
    inventory: Callable[[], Sequence[Device]]
