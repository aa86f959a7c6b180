"""Who may join a job, which rank each process gets, and who is still missing: pure functions of what registered."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.config import ENVIRONMENT, Config
from kvstore.errors import JoinError, KVStoreError, MismatchError
from kvstore.messages import Register, Role
from kvstore.server.processes import Process, listed, place

_SHARED = ("num_workers", "num_servers", "chunk_elements")
_ID = {Role.WORKER: "worker_id", Role.SERVER: "server_id"}
_COUNT = {Role.WORKER: "num_workers", Role.SERVER: "num_servers"}


def count(config: Config, role: Role) -> int:
    """How many processes of a role the job has."""
    return config.num_workers if role is Role.WORKER else config.num_servers


def refusal(config: Config, processes: Collection[Process], started: bool, register: Register) -> KVStoreError | None:
    """Why a process that is not known yet may not join, or None.

    Returns:
        MismatchError: it was started with other settings than the scheduler.
        JoinError: its rank is taken or does not exist, there is no place left, or it comes too late.
    """
    who = f"{register.role} ({place(register.host, register.pid, register.endpoint)})"
    if register.role is Role.SCHEDULER:
        return JoinError(f"{who} registered, but this job has its scheduler: start it as worker or server")
    if register.role is Role.SERVER and not register.endpoint:
        return JoinError(f"{who} does not say where it listens", role=register.role)
    return _mismatch(config, who, register) or _no_place(config, processes, started, who, register)


def _mismatch(config: Config, who: str, register: Register) -> MismatchError | None:
    for name in _SHARED:
        given, own = getattr(register, name), getattr(config, name)
        if given != own:
            variable = ENVIRONMENT[name]
            return MismatchError(
                f"{who} was started with {variable}={given}, the scheduler with {variable}={own}: "
                "give every process of a job the same value",
                role=register.role,
            )
    return None


def _no_place(
    config: Config, processes: Collection[Process], started: bool, who: str, register: Register
) -> JoinError | None:
    role, total = register.role, count(config, register.role)
    others = [process for process in processes if process.role is role]
    facts = {"role": str(role), "rank": register.rank}
    if register.rank is not None and register.rank >= total:
        variable = ENVIRONMENT[_ID[role]]
        return JoinError(
            f"{who} asks for rank {register.rank} ({variable}), but the job has {total}: ranks are 0 to {total - 1}",
            **facts,
        )
    holder = next((other for other in others if register.rank in (other.rank, other.wanted)), None)
    if register.rank is not None and holder is not None and not started:
        variable = ENVIRONMENT[_ID[role]]
        return JoinError(
            f"{who} asks for rank {register.rank}, which {holder.describe()} already has: "
            f"give every {role} its own {variable}",
            **facts,
        )
    if started or len(others) >= total:
        reason = "comes too late: the job has started" if started else "is one too many"
        return JoinError(
            f"{who} {reason}; all {total} {role} places ({ENVIRONMENT[_COUNT[role]]}={total}) are taken by "
            f"{'; '.join(other.describe() for other in others[:8])}{' ...' if len(others) > 8 else ''}",
            **facts,
        )
    return None


def ranks(config: Config, processes: Collection[Process], role: Role) -> dict[str, int]:
    """Rank by node: the wanted ranks, and the lowest free ones for the others in the order they registered."""
    members = [process for process in processes if process.role is role]
    given = {process.node: process.wanted for process in members if process.wanted is not None}
    free = iter(sorted(set(range(count(config, role))) - set(given.values())))
    return {process.node: given[process.node] if process.node in given else next(free) for process in members}


def missing_text(config: Config, processes: Collection[Process]) -> str:
    """Who has not registered: '1 of 2 servers registered; missing: server 1'. Empty if the job is complete."""
    counts, names = [], []
    for role in (Role.SERVER, Role.WORKER):
        taken, total = set(ranks(config, processes, role).values()), count(config, role)
        absent = sorted(set(range(total)) - taken)
        if absent:
            counts.append(f"{len(taken)} of {total} {role}s")
            names.append(f"{role}{'s' if len(absent) > 1 else ''} {listed(absent)}")
    return f"{' and '.join(counts)} registered; missing: {'; '.join(names)}" if counts else ""
