"""The daemon's share of `rlhfd doctor`: what only it can see."""

import shutil
from typing import Any

from rlhfd.daemon.house import House

LOW = 5 * 1024**3  # bytes


def checks(house: House) -> list[dict[str, Any]]:
    """{check, ok, detail, fix} each: the state directory's room, every device."""
    free = shutil.disk_usage(house.state.root).free
    room = {
        "check": "state directory",
        "ok": free > LOW,
        "detail": f"{house.state.root}, {free / 1024**3:.0f} GiB free, epoch {house.epoch}",
        "fix": "" if free > LOW else "make room: a checkpoint is 16 bytes a parameter, and two must fit",
    }
    devices = [
        {
            "check": f"device {device.id}",
            "ok": device.unusable is None,
            "detail": device.unusable or (f"in use by {device.busy_by}" if device.busy_by else f"{device.name}, free"),
            "fix": "" if device.unusable is None else "see nvidia-smi; rlhfd leaves it alone",
        }
        for device in house.inventory()
    ]
    return [room, *devices]
