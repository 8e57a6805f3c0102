"""Placement of roles on devices: one process per device, shared by the roles of that device. Pure, without torch.

    Placement.of(Nodes(2, 8), pools)           every role on all devices, except roles with nodes of their own or a placement
    set_device_map(DataParallelConfig(actor_devices=[0, 1], critic_devices=[2]))      from a script, before the run
    Placement.from_roles({"actor": [0, 1], "critic": [2]})

Devices are numbered through the run, the nodes one after the other; the process of device d has rank d.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from verl.errors import ConfigError, nearest

# role -> the role that gives it devices, unless it is placed itself
FOLLOWS = {"rollout": "actor", "reference": "actor", "critic": "actor", "reward": "rollout"}
ROLES = ("actor", *FOLLOWS)
_SPELLINGS = {"ref": "reference", "reward_model": "reward"}


@dataclass(frozen=True)
class Nodes:
    """`count` nodes with `devices` each."""

    count: int = 1
    devices: int = 1

    @property
    def total(self) -> int:
        """Devices of all nodes."""
        return self.count * self.devices


@dataclass(frozen=True)
class DataParallelConfig:
    """Devices of the actor (with its rollout and reference), of the critic and of the reward; empty: the actor's devices.

    DataParallelConfig(actor_devices=[0, 1], critic_devices=[2], reward_model_devices=[3])
    """

    actor_devices: list[int] = field(default_factory=list)
    critic_devices: list[int] = field(default_factory=list)
    reward_model_devices: list[int] = field(default_factory=list)
    rollout_devices: list[int] = field(default_factory=list)
    reference_devices: list[int] = field(default_factory=list)

    def roles(self) -> dict[str, list[int]]:
        """Role -> devices, for the roles that were given some."""
        by_role = {
            "actor": self.actor_devices,
            "critic": self.critic_devices,
            "reward": self.reward_model_devices,
            "rollout": self.rollout_devices,
            "reference": self.reference_devices,
        }
        return {role: list(devices) for role, devices in by_role.items() if devices}


@dataclass(frozen=True)
class Placement:
    """`devices[role]` are ascending device numbers; every role of the run has some, and every device has a role.

    >>> Placement({"actor": (0, 1), "rollout": (2, 3)}, devices_per_node=4).devices["rollout"]
    (2, 3)
    """

    devices: dict[str, tuple[int, ...]]
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        """Processes of the run."""
        return len({d for devices in self.devices.values() for d in devices})

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)

    def roles_of(self, device: int) -> list[str]:
        """The roles that share the process of `device`."""
        return [role for role in self.devices if device in self.devices[role]]

    def pools(self) -> dict[tuple[int, ...], list[str]]:
        """Device groups with the roles that live on exactly them; roles of one pool are colocated."""
        pools: dict[tuple[int, ...], list[str]] = {}
        for role in self.devices:
            pools.setdefault(self.devices[role], []).append(role)
        return pools

    def describe(self, roles: Collection[str] | None = None) -> str:
        """The devices of `roles` (default: all), for the header of a run: "actor, rollout on 0-1; critic on 2"."""
        pools = {devices: [r for r in pool if roles is None or r in roles] for devices, pool in self.pools().items()}
        return "; ".join(f"{', '.join(pool)} on {_span(devices)}" for devices, pool in pools.items() if pool)

    @classmethod
    def colocated(
        cls, roles: Iterable[str], nnodes: int, devices_per_node: int, started: int | None = None
    ) -> Placement:
        """Every role on all devices. `started` is the number of processes of a launcher. It must equal the config's number,
        unless the config leaves it at 1. Raises ConfigError."""
        if nnodes < 1 or devices_per_node < 1:
            raise ConfigError("trainer.nnodes and trainer.n_gpus_per_node must be at least 1.")
        num_devices = _started(nnodes * devices_per_node, started)
        return cls(dict.fromkeys(roles, tuple(range(num_devices))), max(devices_per_node, -(-num_devices // nnodes)))

    @classmethod
    def from_roles(
        cls,
        roles: Mapping[str, Iterable[int]],
        num_devices: int | None = None,
        devices_per_node: int | None = None,
        teachers: Iterable[str] = (),
    ) -> Placement:
        """Roles that are not named take the devices of the role that FOLLOWS names, and `teachers` the reference's devices.
        The actor takes all `num_devices` (default: as many as are named). Raises ConfigError for unknown roles, and for
        devices that are not there or that no role uses."""
        follows = {**FOLLOWS, **dict.fromkeys(teachers, "reference")}
        devices_of = {_role_name(name, follows): _device_list(name, devices) for name, devices in roles.items()}
        named = {d for devices in devices_of.values() for d in devices}
        total = num_devices if num_devices is not None else max(named, default=0) + 1
        beyond = sorted(d for d in named if d >= total)
        if beyond:
            raise ConfigError(
                f"The placement names device {beyond[0]}, but the run has {total}, numbered from 0. Raise "
                "trainer.n_gpus_per_node or trainer.nnodes, or place the roles on the devices that there are."
            )
        placed = {"actor": devices_of.get("actor") or tuple(range(total))}
        for role, source in follows.items():
            placed[role] = devices_of.get(role) or placed[source]
        idle = sorted(set(range(total)) - {d for devices in placed.values() for d in devices})
        if idle:
            raise ConfigError(
                f"No role is placed on device {_span(tuple(idle))} of the {total}. Place one there, or lower "
                "trainer.n_gpus_per_node."
            )
        return cls(placed, devices_per_node or total)

    @classmethod
    def of(
        cls,
        training: Nodes,
        pools: Mapping[tuple[str, ...], Nodes],
        placed: Mapping[str, Iterable[int]],
        *,
        num_devices: int | None = None,
        teachers: Sequence[str] = (),
    ) -> Placement:
        """All roles, and roles for `teachers`, on the nodes of `training`, except roles that `placed` puts on certain devices
        and groups of roles with nodes in `pools` (count 0: none). A device map that a script has set takes the place of
        `placed`.

        `num_devices` is the number of processes that a launcher has started. It must then equal the number of all nodes'
        devices, unless that is 1. One-node pools and training on one node are taken to be on the same node. Raises ConfigError.
        """
        if training.count < 1 or training.devices < 1:
            raise ConfigError("trainer.nnodes and trainer.n_gpus_per_node must be at least 1.")
        total, apart = training.total, dict[str, Iterable[int]]()
        for names, nodes in pools.items():
            if nodes.count:
                apart |= {"actor": range(training.total), **dict.fromkeys(names, range(total, total + nodes.total))}
                total += nodes.total
        roles = {**apart, **(_device_map.roles() if _device_map is not None else placed)}
        if total == 1:
            total = max((d for devices in roles.values() for d in devices), default=0) + 1
        total = _started(total, num_devices)
        counts = [training.count, *(nodes.count for nodes in pools.values())]
        num_nodes = 1 if max(counts) == 1 else sum(counts)
        return cls.from_roles(roles, total, max(training.devices, -(-total // num_nodes)), teachers)


def _started(configured: int, started: int | None) -> int:
    """The number of devices: as `configured`, unless a launcher has `started` processes."""
    if started is not None and configured not in (1, started):
        raise ConfigError(
            f"{started} processes were started (WORLD_SIZE), but the config asks for {configured} devices. Start as "
            "many (torchrun --nproc_per_node), or change trainer.nnodes and trainer.n_gpus_per_node."
        )
    return configured if started is None else started


_device_map: DataParallelConfig | None = None


def set_device_map(config: DataParallelConfig | None) -> None:
    """Place the roles of the runs that this process starts from now on; None: as their configs say."""
    global _device_map
    if config is not None:
        Placement.from_roles(config.roles())  # raises here, at the mistake
    _device_map = config


def _role_name(name: str, follows: Mapping[str, str]) -> str:
    # existing releases name the worker of several roles after them: actor_rollout, and with the reference too
    combined = name.startswith("actor_") and {"actor", "rollout", "ref"}.issuperset(name.split("_"))
    role, placed = "actor" if combined else _SPELLINGS.get(name, name), ("actor", *follows)
    if role not in placed:
        raise ConfigError(
            f"There is no role {name!r} to place{nearest(name, placed) or '; there are ' + ', '.join(placed)}"
        )
    return role


def _device_list(role: str, devices: Iterable[int]) -> tuple[int, ...]:
    listed = tuple(devices)
    if not listed or any(isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in listed):
        raise ConfigError(f"The devices of {role} are {list(listed)}; give at least one whole number from 0 on.")
    if len(set(listed)) != len(listed):
        raise ConfigError(f"The devices of {role} are {list(listed)}: one of them is named twice.")
    return tuple(sorted(listed))


def _span(devices: tuple[int, ...]) -> str:
    """0-3 for neighbours, 0,2 else."""
    if len(devices) > 1 and devices == tuple(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices))
