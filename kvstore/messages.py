"""Every message of the wire protocol: frozen tagged types; the union `Message` is the protocol.

Rules of evolution:
- A field is added only with a default, and never changes its meaning or type; a removed name is never used again.
- A change that an older process would misread raises `PROTOCOL_VERSION`; processes of different versions refuse
  each other by name instead of guessing.
- Entries that occur many times in a message are arrays on the wire; new fields go at their end.
- Payloads (raw tensors, codec bytes) travel as frames after the header, one per entry, in the order of the entries.

`sequence` numbers are chosen by the requesting process and echoed by the answer; a request sent twice with the same
number is answered twice and applied once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from kvstore.on_stale import OnStale

PROTOCOL_VERSION = 1

Key: TypeAlias = int | str
Number: TypeAlias = int | float
Fact: TypeAlias = str | int | float | None
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9)]
"""A duration; the bound refuses NaN, with which a deadline would never pass."""
Frame: TypeAlias = bytes | bytearray | memoryview
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
Bound: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=32)]


class Role(StrEnum):
    """What a process does in the job."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class _Message(msgspec.Struct, frozen=True, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    pass


class Failure(_Entry, frozen=True):
    """An error on its way to another process: class name in `errors`, text, facts."""

    error: str
    text: str
    facts: dict[str, Fact] = {}


# --- membership: any process <-> scheduler ------------------------------------------------------------------------


class Gone(_Entry, frozen=True):
    """A process that is out: `lost` (died, `age` seconds after it was last heard of) or closed in good order."""

    role: Role
    rank: Rank
    lost: bool
    age: float = 0.0
    exit_code: int | None = None


class Register(_Message, frozen=True, kw_only=True, tag="register"):
    """First message of a worker or server. `endpoint`: where a server listens. `rank`: wanted, None for any."""

    role: Role
    endpoint: str = ""
    rank: Rank | None = None
    num_workers: Count
    num_servers: Count
    chunk_elements: Count
    pid: Count = 0
    host: str = ""


class Waiting(_Message, frozen=True, kw_only=True, tag="waiting"):
    """The job is not complete: what has registered so far and who is missing, for people."""

    text: str


class Start(_Message, frozen=True, kw_only=True, tag="start"):
    """The job is complete: the receiver's rank and where the servers listen, by rank."""

    job: str
    rank: Rank
    servers: list[str]


class Beat(_Message, frozen=True, kw_only=True, tag="beat"):
    """Sign of life. The answer is a `Roster`."""


class Roster(_Message, frozen=True, kw_only=True, tag="roster"):
    """Who is out. Sent on every change and in answer to every beat, so a lost one does no harm."""

    gone: list[Gone] = []


class Probe(_Message, frozen=True, kw_only=True, tag="probe"):
    """Asks nothing; that it can be sent shows that the connection stands (ZeroMQ's own heartbeats see to that)."""


class Leave(_Message, frozen=True, kw_only=True, tag="leave"):
    """This process closes in good order; answered by `Ack`."""

    sequence: Count


class Exited(_Message, frozen=True, kw_only=True, tag="exited"):
    """A launcher saw a process of the job end without leaving."""

    role: Role
    rank: Rank
    code: int


class Barrier(_Message, frozen=True, kw_only=True, tag="barrier"):
    """The `turn`-th barrier of this worker; answered when every worker has called it."""

    sequence: Count
    rank: Rank
    turn: Count
    timeout: Seconds


class Agree(_Message, frozen=True, kw_only=True, tag="agree"):
    """The `turn`-th value of this worker for `topic`; answered by Ack if all ranks gave the same, else by Failed."""

    sequence: Count
    rank: Rank
    topic: str
    turn: Count
    value: str
    timeout: Seconds


# --- data: worker <-> server --------------------------------------------------------------------------------------


class PushEntry(_Entry, frozen=True):
    """One encoded chunk: the `round`-th push of this key by this worker. `meta`: numbers of the codec.
    `whole`: the payload is the whole key, pushed as its chunk 0, and stands for a push of every chunk."""

    key: Key
    chunk: Count
    round: Count
    codec: str
    meta: dict[str, Number | str] = {}
    whole: bool = False


class ChunkEntry(_Entry, frozen=True):
    """A chunk at `round` pushes of the asking worker and `epoch` assignments. Used by `Pull` and echoed by `Values`."""

    key: Key
    chunk: Count
    round: Count
    epoch: Count


class AssignEntry(_Entry, frozen=True):
    """Overwrites a chunk (the `epoch`-th assignment) once `round` rounds are applied; the first one creates it."""

    key: Key
    chunk: Count
    shape: Shape
    dtype: str
    epoch: Count
    round: Count
    sync: bool
    average: bool = False
    whole: bool = False
    staleness: Bound = -1
    on_stale: OnStale = OnStale.BLOCK


class DeclareEntry(_Entry, frozen=True):
    """A worker's view of a key; answered once the key has seen `epoch` assignments, which stand for its first
    `round` pushes too."""

    key: Key
    shape: Shape
    dtype: str
    epoch: Count
    sync: bool
    average: bool = False
    round: Count = 0
    staleness: Bound = -1
    on_stale: OnStale = OnStale.BLOCK


class Push(_Message, frozen=True, kw_only=True, tag="push"):
    """Encoded chunks, one frame each; answered by Ack on receipt, before the round is complete.

    Chunks that cannot be accepted are named by a Failed before the Ack.
    """

    sequence: Count
    rank: Rank
    entries: list[PushEntry]


class Pull(_Message, frozen=True, kw_only=True, tag="pull"):
    """Asks for chunks; answered by one or more `Values`, or Failed. `timeout`: seconds the server may wait."""

    sequence: Count
    rank: Rank
    entries: list[ChunkEntry]
    timeout: Seconds


class Values(_Message, frozen=True, kw_only=True, tag="values"):
    """Raw little-endian chunk values, one frame per entry."""

    entries: list[ChunkEntry]


class Assign(_Message, frozen=True, kw_only=True, tag="assign"):
    """Values to set, one raw frame per entry; answered by Ack when applied."""

    sequence: Count
    rank: Rank
    entries: list[AssignEntry]
    timeout: Seconds


class Declare(_Message, frozen=True, kw_only=True, tag="declare"):
    """Waits until keys exist and compares shapes and dtypes; answered by Declared or Failed."""

    sequence: Count
    rank: Rank
    entries: list[DeclareEntry]
    timeout: Seconds


class Declared(_Message, frozen=True, kw_only=True, tag="declared"):
    """For each declared key, in order: does it lie whole on one server?"""

    sequence: Count
    whole: list[bool]


class Refuse(_Message, frozen=True, kw_only=True, tag="refuse"):
    """This worker refused to push `keys` in these rounds; whoever waits for them gets the failure."""

    sequence: Count
    rank: Rank
    rounds: list[tuple[Key, Count]]
    failure: Failure


class SetOptimizer(_Message, frozen=True, kw_only=True, tag="set_optimizer"):
    """The `turn`-th optimizer of this worker: rank 0's is installed, others' are compared. `spec`: JSON."""

    sequence: Count
    rank: Rank
    turn: Count
    spec: str
    timeout: Seconds


class SetLearningRate(_Message, frozen=True, kw_only=True, tag="set_learning_rate"):
    """A new learning rate and per-key multipliers (None: unchanged)."""

    sequence: Count
    rank: Rank
    learning_rate: float | None = None
    multipliers: dict[str, float] | None = None


class SetCompression(_Message, frozen=True, kw_only=True, tag="set_compression"):
    """The compression setting in force, from rank 0, as JSON; payloads still say how they were encoded."""

    sequence: Count
    rank: Rank
    params: str


class ReadState(_Message, frozen=True, kw_only=True, tag="read_state"):
    """Asks for everything a server holds of one chunk; answered by State. `values`: value and master too."""

    sequence: Count
    rank: Rank
    key: Key
    chunk: Count
    values: bool = True


class WriteState(_Message, frozen=True, kw_only=True, tag="write_state"):
    """Sets everything a server holds of one chunk; frames as in State."""

    sequence: Count
    rank: Rank
    key: Key
    chunk: Count
    step: Count
    names: list[str]
    dtypes: list[str]


class State(_Message, frozen=True, kw_only=True, tag="state"):
    """Value, master and optimizer state of a chunk: one flat raw frame per name; `step`: updates so far."""

    sequence: Count
    key: Key
    chunk: Count
    step: Count
    names: list[str]
    dtypes: list[str]
    optimizer: str | None = None


# --- answers and inspection ---------------------------------------------------------------------------------------


class Ack(_Message, frozen=True, kw_only=True, tag="ack"):
    """Requests that were received (Push) or are done (all others)."""

    sequences: list[Count]


class Failed(_Message, frozen=True, kw_only=True, tag="failed"):
    """A request failed. `sequence` None: the message could not be read far enough to know.

    `entries`: the chunks of a Push or Pull that failed, the others stand; empty: the whole request.
    """

    failure: Failure
    sequence: Count | None = None
    entries: list[ChunkEntry] = []


class AskStatus(_Message, frozen=True, kw_only=True, tag="ask_status"):
    """Asks any process what it is doing; needs no job id. `keys`: list every key, not only totals."""

    sequence: Count
    keys: bool = False


class KeyStatus(_Entry, frozen=True):
    """What a server holds of one key. `rounds`: applied, least over its chunks."""

    key: Key
    chunks: Count
    elements: Count
    rounds: Count
    raw_bytes: Count
    received_bytes: Count


class ProcessStatus(_Entry, frozen=True):
    """What the scheduler knows of one process. `state`: joining, active, lost or left."""

    role: Role
    rank: Rank
    state: str
    age: float
    endpoint: str
    host: str
    pid: Count


class Status(_Message, frozen=True, kw_only=True, tag="status"):
    """Answer to AskStatus. Totals are bytes since the start; `staleness`: (updates old, asynchronous pushes)."""

    sequence: Count
    role: Role
    rank: Rank
    job: str
    num_workers: Count
    num_servers: Count
    processes: list[ProcessStatus] = []
    keys: list[KeyStatus] = []
    totals: dict[str, Number] = {}
    optimizer: str | None = None
    compression: str | None = None
    staleness: list[tuple[Count, Count]] = []


Message: TypeAlias = (
    Register | Waiting | Start | Beat | Roster | Probe | Leave | Exited | Barrier | Agree
    | Push | Pull | Values | Assign | Declare | Declared | Refuse
    | SetOptimizer | SetLearningRate | SetCompression | ReadState | WriteState | State
    | Ack | Failed | AskStatus | Status
)  # fmt: skip

WITHOUT_JOB: tuple[type, ...] = (Register, AskStatus, Status, Failed, Waiting, Start)
"""Messages that are read whatever job id they carry: the job's id is not known yet, or is not needed."""
