"""The simulator, run with toy machines: a server that counts each push once, clients that push until acknowledged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import methodcaller

import pytest

from kvstore.errors import ArrayError
from kvstore.machine import Action, Adopt, Connect, Send
from kvstore.memory_network import Faults
from kvstore.messages import Ack, Failed, Frame, Message, Probe, Push, Register, Role
from kvstore.simulator import Simulator
from kvstore.wire import Wire

SERVER = "memory://server"
ROUGH = Faults(delay=(0.001, 0.05), stall=0.02, disconnect=0.02, duplicate=0.05)


class Counter:
    """Acknowledges every push and counts each (sender's rank, sequence) once."""

    def __init__(self, again: bool = False) -> None:
        self.finished = False
        self.again = again
        self.counted: dict[tuple[int, int], bytes] = {}
        self.copies = 0
        self.lost: list[str] = []
        self.times: list[float] = []

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        if not isinstance(message, Push):
            raise ArrayError(f"no {type(message).__name__} here", key="w")
        self.copies += (message.rank, message.sequence) in self.counted
        self.counted[message.rank, message.sequence] = bytes(frames[0])
        yield Send(sender, Ack(sequences=[message.sequence]))

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        self.lost.append(to)
        return [Send(to, Probe())] if self.again else []

    def tick(self, now: float) -> Iterable[Action]:
        self.times.append(now)
        return []

    def validate(self) -> None:
        assert len(self.counted) < 1000, "counts only so far"


class Client:
    """Pushes what it is given, again every second until it is acknowledged; ends after `last` pushes."""

    def __init__(self, rank: int, last: int = -1) -> None:
        self.rank, self.last = rank, last
        self.open: dict[int, float] = {}
        self.acknowledged: list[int] = []
        self.failed: list[Failed] = []

    @property
    def finished(self) -> bool:
        return len(self.acknowledged) == self.last

    def push(self, sequence: int, now: float) -> list[Action]:
        self.open[sequence] = now
        return [Send("server-0", Push(sequence=sequence, rank=self.rank, entries=[]), [f"{sequence}".encode()])]

    def receive(self, sender: str, message: Message, frames: Sequence[Frame], now: float) -> Iterable[Action]:
        if isinstance(message, Failed):
            self.failed.append(message)
        elif isinstance(message, Ack):
            self.acknowledged += [number for number in message.sequences if self.open.pop(number, None) is not None]
        return []

    def unreachable(self, to: str, now: float) -> Iterable[Action]:
        return []

    def tick(self, now: float) -> Iterable[Action]:
        for sequence, since in list(self.open.items()):
            if now - since > 1.0:
                yield from self.push(sequence, now)


def cluster(seed: int = 0, faults: Faults | None = None, clients: int = 1, last: int = -1) -> Simulator:
    simulator = Simulator(seed, faults)
    simulator.add("server", Counter(), listen_as=SERVER)
    for rank in range(clients):
        simulator.add(f"client-{rank}", Client(rank, last), connect={"server-0": SERVER})
    return simulator


def push(simulator: Simulator, rank: int, *sequences: int) -> None:
    for sequence in sequences:
        simulator.call(f"client-{rank}", methodcaller("push", sequence, simulator.now))


def settle(simulator: Simulator, limit: float = 60.0) -> None:
    clients = [simulator.machine(name) for name in simulator.names if name.startswith("client")]
    simulator.run_until(lambda: not any(client.open for client in clients), limit, "every acknowledgement")


def rough_story(seed: int) -> str:
    simulator = cluster(seed, ROUGH, clients=3)
    for rank in range(3):
        push(simulator, rank, *range(20))
    settle(simulator)
    return simulator.story(last=100_000)


def test_a_push_is_counted_and_acknowledged() -> None:
    simulator = cluster()
    push(simulator, 0, 5)
    settle(simulator, limit=1.0)
    assert simulator.machine("server").counted == {(0, 5): b"5"}
    assert simulator.machine("client-0").acknowledged == [5]


def test_the_same_seed_gives_the_same_events_and_another_seed_others() -> None:
    assert rough_story(1) == rough_story(1)
    assert rough_story(1).splitlines()[1:] != rough_story(2).splitlines()[1:]


@pytest.mark.parametrize("seed", range(20))
def test_every_push_counts_once_under_all_faults(seed: int) -> None:
    simulator = cluster(seed, ROUGH, clients=3)
    for rank in range(3):
        push(simulator, rank, *range(20))
    settle(simulator)
    assert len(simulator.machine("server").counted) == 60
    for rank in range(3):
        assert sorted(simulator.machine(f"client-{rank}").acknowledged) == list(range(20))


def test_duplicates_arrive_twice() -> None:
    simulator = cluster(faults=Faults(duplicate=1.0))
    push(simulator, 0, *range(10))
    simulator.run(0.5)
    assert simulator.machine("server").copies == 10


def test_disconnects_lose_messages_until_they_are_sent_again() -> None:
    simulator = cluster(seed=1, faults=Faults(disconnect=0.3))
    push(simulator, 0, *range(10))
    settle(simulator)
    assert simulator.machine("server").copies, "an acknowledgement was lost"
    assert "connection broke" in simulator.story()


def test_a_bad_request_is_answered_and_a_foreign_job_refused() -> None:
    simulator = cluster()
    simulator.call("client-0", lambda client: [Send("server-0", Register(role=Role.WORKER, num_workers=1,
                                                     num_servers=1, chunk_elements=64))])  # fmt: skip
    simulator.run(0.1)
    simulator.call("server", lambda server: [Adopt("new")])
    push(simulator, 0, 1)
    simulator.run(0.1)
    refused, foreign = simulator.machine("client-0").failed
    assert (refused.failure.error, refused.failure.facts, refused.sequence) == ("ArrayError", {"key": "w"}, None)
    assert (foreign.failure.error, foreign.sequence) == ("ProtocolError", None)
    simulator.call("client-0", lambda client: [Adopt("new")])
    settle(simulator)
    assert (0, 1) in simulator.machine("server").counted


def test_connect_is_an_action_too() -> None:
    simulator = Simulator()
    simulator.add("server", Counter(), listen_as=SERVER)
    simulator.add("client-0", Client(0))
    simulator.call("client-0", lambda client: [Connect("server-0", SERVER), *client.push(1, simulator.now)])
    settle(simulator)


def test_machines_tick_at_their_pace() -> None:
    simulator = Simulator(tick=0.5)
    simulator.add("server", Counter())
    simulator.run(100.0)
    times = simulator.machine("server").times
    assert 180 < len(times) < 220
    assert all(0.25 <= later - earlier <= 0.75 for earlier, later in pairwise(times))


def test_a_killed_server_is_replaced_by_a_restarted_one() -> None:
    simulator = cluster()
    push(simulator, 0, 1)
    settle(simulator)
    simulator.kill("server")
    assert not simulator.is_alive("server")
    push(simulator, 0, 2)
    simulator.run(5.0)
    assert simulator.machine("client-0").open
    simulator.restart("server", Counter())
    settle(simulator)
    assert set(simulator.machine("server").counted) == {(0, 2)}


def test_a_restarted_client_has_a_new_node_id_and_the_old_one_is_unreachable() -> None:
    simulator = cluster()
    push(simulator, 0, 1)
    settle(simulator)
    simulator.restart("client-0", Client(7))
    simulator.run(1.0)
    simulator.call("server", lambda server: [Send("client-0", Probe()), Send("client-0#2", Probe())])
    assert simulator.machine("server").lost == ["client-0"]
    push(simulator, 0, 1)
    settle(simulator)
    assert (7, 1) in simulator.machine("server").counted


def test_a_stopped_process_neither_ticks_nor_receives_until_it_is_resumed() -> None:
    simulator = cluster()
    simulator.run(1.0)
    simulator.stop("server")
    ticks = len(simulator.machine("server").times)
    push(simulator, 0, 1)
    simulator.run(2.0)
    assert not simulator.machine("server").counted
    assert len(simulator.machine("server").times) == ticks
    with pytest.raises(AssertionError, match="server was stopped"):
        simulator.call("server", lambda server: [])
    simulator.resume("server")
    assert simulator.machine("server").counted
    settle(simulator)
    simulator.run(1.0)
    assert len(simulator.machine("server").times) > ticks


def test_a_client_stopped_for_long_becomes_unreachable() -> None:
    simulator = cluster(faults=Faults(silence=3.0))
    simulator.run(1.0)
    simulator.stop("client-0")
    simulator.call("server", lambda server: [Send("client-0", Probe())])
    assert simulator.machine("server").lost == []
    simulator.run(4.0)
    simulator.call("server", lambda server: [Send("client-0", Probe())])
    assert simulator.machine("server").lost == ["client-0"]


def test_a_cut_between_two_processes_leaves_the_others() -> None:
    simulator = cluster(clients=2)
    simulator.run(1.0)
    simulator.cut("client-0", "server")
    for rank in (0, 1):
        push(simulator, rank, 1)
    simulator.run(10.0)
    assert set(simulator.machine("server").counted) == {(1, 1)}
    simulator.heal("client-0", "server")
    settle(simulator)
    assert set(simulator.machine("server").counted) == {(0, 1), (1, 1)}


def test_lose_takes_the_next_chosen_message_only() -> None:
    simulator = cluster()
    simulator.lose(lambda sender, to, message: sender == "server" and isinstance(message, Ack))
    push(simulator, 0, 1)
    simulator.run(0.5)
    assert simulator.machine("server").counted
    assert not simulator.machine("client-0").acknowledged
    settle(simulator)
    assert simulator.machine("server").copies == 1


def test_disconnect_breaks_a_standing_connection() -> None:
    simulator = cluster()
    with pytest.raises(AssertionError, match="no connection from client-0 to server-0 stands"):
        simulator.disconnect("client-0", "server-0")
    simulator.run(1.0)
    simulator.disconnect("client-0", "server-0")
    simulator.call("server", lambda server: [Send("client-0", Probe())])
    assert simulator.machine("server").lost == ["client-0"]


def test_a_finished_machine_leaves_and_its_last_messages_arrive() -> None:
    simulator = cluster(last=2)
    push(simulator, 0, 1, 2)
    simulator.run_until(lambda: not simulator.is_alive("client-0"), 5.0)
    simulator.run(2.0)
    simulator.call("server", lambda server: [Send("client-0", Probe())])
    assert simulator.machine("server").lost == ["client-0"]
    with pytest.raises(AssertionError, match="client-0 finished"):
        simulator.call("client-0", lambda client: [])


def test_at_runs_things_at_their_time() -> None:
    simulator = cluster()
    simulator.at(simulator.now + 3.0, simulator.kill, "server")
    before = simulator.now
    simulator.run_until(lambda: not simulator.is_alive("server"), 10.0)
    assert simulator.now == before + 3.0


def test_run_until_tells_the_story_when_its_limit_passes() -> None:
    simulator = cluster(seed=42)
    push(simulator, 0, 1)
    simulator.at(simulator.now + 0.5, simulator.kill, "server")
    simulator.run(1.0)
    with pytest.raises(AssertionError) as caught:
        simulator.run_until(lambda: False, 2.0, "the impossible")
    text = str(caught.value)
    assert text.startswith("the impossible did not happen within 2.0 simulated seconds\nseed 42; the last ")
    assert "client-0 -> server-0 Push(sequence=1" in text
    assert "server <- client-0 Push(sequence=1" in text
    assert "server was killed" in text


def test_a_fault_of_a_machine_carries_the_story() -> None:
    simulator = cluster()
    simulator.machine("server").counted = {(9, number): b"" for number in range(999)}
    push(simulator, 0, 1)
    with pytest.raises(AssertionError, match="counts only so far") as caught:
        simulator.run(1.0)
    assert "server <- client-0 Push(sequence=1" in caught.value.__notes__[0]


def test_an_error_of_user_code_reaches_the_caller() -> None:
    simulator = cluster()
    with pytest.raises(AttributeError, match="pull"):
        simulator.call("client-0", methodcaller("pull"))


def test_a_machine_is_told_once_per_event_that_a_peer_is_unreachable() -> None:
    simulator = Simulator()
    simulator.add("server", Counter(again=True))
    simulator.call("server", lambda server: [Send("nobody", Probe()), Send("nobody", Probe())])
    assert simulator.machine("server").lost == ["nobody"]
    simulator.call("server", lambda server: [Send("nobody", Probe())])
    assert simulator.machine("server").lost == ["nobody", "nobody"]


def test_a_name_is_added_once() -> None:
    simulator = cluster()
    with pytest.raises(AssertionError, match="'server' was added before"):
        simulator.add("server", Counter())


def test_wires_may_check_payloads() -> None:
    simulator = Simulator()
    simulator.add("server", Counter(), listen_as=SERVER, wire=Wire("job", checksum=True))
    simulator.add("client-0", Client(0), connect={"server-0": SERVER}, wire=Wire("job", checksum=True))
    push(simulator, 0, 1)
    settle(simulator)
