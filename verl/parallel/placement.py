"""Placement of roles on devices: one process per device, shared by the roles of that device. Pure, without torch.

    Placement.of(config)                       trainer.nnodes x n_gpus_per_node, trainer.placement, pools of single roles
    set_device_map(DataParallelConfig(actor_devices=[0, 1], critic_devices=[2]))      from a script, before the run
    Placement.from_roles({"actor": [0, 1], "critic": [2]})

Devices are numbered through the run, the nodes one after the other; the process of device d has rank d.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from verl.config import PPOConfig

# role -> the role whose devices it takes when it is not placed itself
FOLLOWS = {"rollout": "actor", "reference": "actor", "critic": "actor", "reward": "rollout"}
ROLES = ("actor", *FOLLOWS)
_SPELLINGS = {"ref": "reference", "reward_model": "reward", "actor_rollout": "actor", "actor_rollout_ref": "actor"}


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
        found = {
            "actor": self.actor_devices,
            "critic": self.critic_devices,
            "reward": self.reward_model_devices,
            "rollout": self.rollout_devices,
            "reference": self.reference_devices,
        }
        return {role: list(devices) for role, devices in found.items() if devices}


@dataclass(frozen=True)
class Placement:
    """`devices[role]` are ascending device numbers; every role of the run has some, and every device has a role."""

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

    def sentence(self, roles: Collection[str] | None = None) -> str:
        """For the header of a run, of those `roles` that it has: "actor, rollout on 0-1; critic on 2"."""
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
        asked = _started(nnodes * devices_per_node, started)
        return cls(dict.fromkeys(roles, tuple(range(asked))), max(devices_per_node, -(-asked // nnodes)))

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
    def of(cls, config: PPOConfig, num_devices: int | None = None, teachers: Sequence[str] = ()) -> Placement:
        """The placement of a config, with roles for `teachers`; a device map that a script has set goes before
        `trainer.placement`.

        `num_devices` is the number of processes that a launcher has started. It must then equal the config's number, unless
        the config leaves it at 1. One-node pools for rollout and for training are taken to be on the same node. Raises
        ConfigError.
        """
        trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
        if trainer.nnodes < 1 or trainer.n_gpus_per_node < 1:
            raise ConfigError("trainer.nnodes and trainer.n_gpus_per_node must be at least 1.")
        roles: Mapping[str, Iterable[int]] = _device_map.roles() if _device_map is not None else trainer.placement
        asked = trainer.nnodes * trainer.n_gpus_per_node
        if rollout.nnodes:
            own = rollout.nnodes * rollout.n_gpus_per_node
            roles = {"actor": range(asked), "rollout": range(asked, asked + own), **roles}
            asked += own
        if teachers and config.distillation.nnodes:
            own = config.distillation.nnodes * config.distillation.n_gpus_per_node
            roles = {**dict.fromkeys(teachers, range(asked, asked + own)), "actor": range(asked), **roles}
            asked += own
        if asked == 1:
            asked = max((d for devices in roles.values() for d in devices), default=0) + 1
        asked = _started(asked, num_devices)
        pools = (trainer.nnodes, rollout.nnodes, config.distillation.nnodes if teachers else 0)
        num_nodes = 1 if max(pools) == 1 else sum(pools)
        return cls.from_roles(roles, asked, max(trainer.n_gpus_per_node, -(-asked // num_nodes)), teachers)


def _started(asked: int, started: int | None) -> int:
    """The number of devices: `asked` by the config, unless a launcher has `started` processes."""
    if started is not None and asked not in (1, started):
        raise ConfigError(
            f"{started} processes were started (WORLD_SIZE), but the config asks for {asked} devices. Start as "
            "many (torchrun --nproc_per_node), or change trainer.nnodes and trainer.n_gpus_per_node."
        )
    return asked if started is None else started


_device_map: DataParallelConfig | None = None


def set_device_map(config: DataParallelConfig | None) -> None:
    """Place the roles of the runs that this process starts from now on; None: as their configs say."""
    global _device_map
    if config is not None:
        Placement.from_roles(config.roles())  # raises here, where the mistake is
    _device_map = config


def _role_name(name: str, follows: Mapping[str, str]) -> str:
    role, known = _SPELLINGS.get(name, name), ("actor", *follows)
    if role not in known:
        raise ConfigError(
            f"There is no role {name!r} to place{nearest(name, known) or '; there are ' + ', '.join(known)}"
        )
    return role


def _device_list(role: str, devices: Iterable[int]) -> tuple[int, ...]:
    found = tuple(devices)
    if not found or any(isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in found):
        raise ConfigError(f"The devices of {role} are {list(found)}; give at least one whole number from 0 on.")
    if len(set(found)) != len(found):
        raise ConfigError(f"The devices of {role} are {list(found)}: one of them is named twice.")
    return tuple(sorted(found))


def _span(devices: tuple[int, ...]) -> str:
    """0-3 for neighbours, 0,2 else."""
    if len(devices) > 1 and devices == tuple(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices))
