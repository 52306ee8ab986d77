"""Which devices a job gets: a decision over an inventory, nothing is touched here.

A device is leased to one job, and inside it to one role or to the roles that name each other by `share:`. On a
machine without a GPU the devices are disjoint core sets; nothing else differs.

    wants = {"generator": 1, "learner": 1, "scorer": "share:learner"}
    place(wants, devices, leased) -> Lease (role -> devices) | Wait (until others give theirs back)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rlhfd.errors import JobFileError

Role: TypeAlias = Literal["generator", "learner", "scorer"]
ROLES: tuple[Role, ...] = get_args(Role)
SHARE = "share:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU or a core set. `id`: the UUID that CUDA_VISIBLE_DEVICES takes, or "cpu:0-3"; `memory` in bytes.

    busy_by: who outside rlhfd uses it, or None; unusable: why no job can ever have it, or None.
    """

    id: str
    kind: Literal["gpu", "cpu"]
    name: str
    memory: int
    cores: tuple[int, ...] = ()
    busy_by: str | None = None
    unusable: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """What each role gets; roles that share have the same devices."""

    devices: Mapping[Role, tuple[Device, ...]]

    @property
    def ids(self) -> tuple[str, ...]:
        """Every device of the lease once, in the order of the roles."""
        return tuple(dict.fromkeys(device.id for held in self.devices.values() for device in held))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Not now: `reason` is a sentence that names the missing devices and who holds them."""

    reason: str


def place(wants: Mapping[str, int | str], devices: Sequence[Device], leased: Mapping[str, str]) -> Lease | Wait:
    """Devices for each role, first free first, roles in the order generator, learner, scorer.

    wants: role -> a number of devices, or "share:<role>". leased: device id -> its holder in words ("job 3"); what is
    leased is that holder's, whatever NVML sees on it. Devices that others use count as existing, unusable ones
    don't. Raises JobFileError for more than the machine has at all, an unknown role, a share without an end.
    """
    _refuse_unknown_roles(wants)
    owners: dict[Role, Role] = {role: _owner(role, wants) for role in ROLES if role in wants}
    counts: dict[Role, int] = {role: _count(role, wants[role]) for role in ROLES if owners.get(role) == role}
    usable = [device for device in devices if device.unusable is None]
    if sum(counts.values()) > len(usable):
        raise JobFileError(_too_many(counts, devices))
    free = [device for device in usable if device.id not in leased and device.busy_by is None]
    if sum(counts.values()) > len(free):
        return Wait(reason=_missing(sum(counts.values()), free, usable, leased))
    supply = iter(free)
    held: dict[Role, tuple[Device, ...]] = {
        role: tuple(next(supply) for _ in range(count)) for role, count in counts.items()
    }
    return Lease(devices={role: held[owner] for role, owner in owners.items()})


def _refuse_unknown_roles(wants: Mapping[str, int | str]) -> None:
    if unknown := [role for role in wants if role not in ROLES]:
        raise JobFileError(f"resources.{unknown[0]} is no role; the roles are {', '.join(ROLES)}")


def _owner(role: Role, wants: Mapping[str, int | str]) -> Role:
    """The role whose devices `role` uses in the end: itself, or where its shares lead."""
    seen: list[str] = []
    name: str = role
    while isinstance(want := wants[name], str):
        seen.append(name)
        target = want.removeprefix(SHARE)
        if target == want or target not in wants:
            raise JobFileError(
                f'resources.{name} = "{want}" names no role of this job; give a number of devices or '
                f'"{SHARE}<role>" with one of {", ".join(other for other in wants if other != name) or "none"}'
            )
        if target in seen:
            raise JobFileError(
                f"resources.{name} shares in a circle ({' -> '.join([*seen, target])}); give one of them a number"
            )
        name = target
    return next(known for known in ROLES if known == name)


def _count(role: Role, want: int | str) -> int:
    """A number of devices. Raises JobFileError below 1."""
    if not isinstance(want, int) or want < 1:
        raise JobFileError(f"resources.{role} = {want!r} is no number of devices; give 1 or more, or leave it out")
    return want


def _too_many(counts: Mapping[Role, int], devices: Sequence[Device]) -> str:
    """The sentence for more than the machine has."""
    usable = [device for device in devices if device.unusable is None]
    listed = ", ".join(device.id for device in usable) or "none"
    broken = "".join(f"; {device.id} is unusable ({device.unusable})" for device in devices if device.unusable)
    hint = '; ask for fewer, or let roles share one ("share:generator")' if len(counts) > 1 else "; ask for fewer"
    asked = ", ".join(f"{role} = {count}" for role, count in counts.items())
    return (
        f"[resources] ({asked}) asks for {_devices(sum(counts.values()))} and this machine has {len(usable)}: "
        f"{listed}{broken}{hint}"
    )


def _missing(wanted: int, free: Sequence[Device], usable: Sequence[Device], leased: Mapping[str, str]) -> str:
    """The sentence for devices that exist and are not free."""
    taken = [f"{d.id} ({leased.get(d.id) or d.busy_by})" for d in usable if d not in free]
    return f"needs {_devices(wanted)}, free are {len(free)} of {len(usable)}; waits for {', '.join(taken)}"


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"
