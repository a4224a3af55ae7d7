"""Engines of two kinds behind one front: processes that compute prompts, and processes that decode (chapter 73)."""

from __future__ import annotations

import warnings
from queue import SimpleQueue
from typing import cast

import zmq

from ..engine_core import StepOutput
from ..errors import require
from ..fields import EngineFields, Recipe, is_on_cpu
from ..sequence import Sequence, SequenceStatus
from .connectors import P2pNcclConnector, SharedMemoryConnector
from .core_client import EngineCoreClient
from .engine_process import Abort, EngineCoreProc, FromEngine, Message, Size, ToEngine, encode, pack_params
from .kv_transfer import Offer, TransferCore, resume
from .manager import CoreManager, EngineDead, close_all
from .packed_form import PackedParams, unpack_params
from .replicas import Replica, least_loaded
from .roles import RECEIVER, SENDER, devices_of, own_options


class Compute(Message):
    """A request, of which the tokens after the prompt are known already. `is_passed`: compute
    only its next token, then hold its blocks."""

    token_ids: list[Size]
    params: PackedParams
    num_prompt_tokens: Size
    is_passed: bool


class Take(Message):
    """Go on with a request that the engine `source` holds. `number`: of its offers."""

    token_ids: list[Size]
    params: PackedParams
    num_prompt_tokens: Size
    source: Size
    number: Size
    blocks: list[Size]
    num_cached_tokens: Size


class Release(Message):
    """Nobody reads the blocks of a request any more. An unknown id is not an error."""


class PoolHandles(Message, tag="POOL_HANDLES"):
    """All engines are ready: the most tokens of a sequence, and the pools of all."""

    max_len: Size
    pools: dict[int, str]


class Gone(Message):
    """Engine `number` has died: what it was sending does not come."""

    number: Size


class PoolHandle(Message, tag="POOL_HANDLE"):
    """Where the pool of engine `id` can be opened, and what is in it."""

    path: str
    form: str


class Met(Message):
    """The engine can reach the pools of all."""


class Held(Message):
    """The next token of a request has been computed, and all before it is in `blocks`."""

    number: Size  # of this engine's offers
    blocks: list[Size]


class Pulled(Message):
    """The engine reads the blocks of a request no more: they have been copied, or need not be."""


class Wanted(Message):
    """Have engine `source` send these blocks of a request to this one."""

    source: Size
    blocks: list[Size]


class Send(Message):
    """Send these blocks of a request to engine `target`."""

    target: Size
    blocks: list[Size]


ToMember = ToEngine | Compute | Take | Release | PoolHandles | Send | Gone
FromMember = FromEngine | PoolHandle | Met | Held | Wanted | Pulled


class TransferProc(EngineCoreProc):
    """The loop of an engine of either kind."""

    core: TransferCore
    reads: object = ToMember

    def __init__(self, core: TransferCore, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
        super().__init__(core, inbox, outbox)
        self.pool = cast(SharedMemoryConnector | P2pNcclConnector, core.copies)
        if isinstance(self.pool, P2pNcclConnector):
            self.pool.ask = self._ask
        self.number = 0  # of the newest offer
        self.offered: set[int] = set()  # of what is held
        self.unread: set[int] = set()  # of what was taken, until it is copied
        self.newest: dict[int, int] = {}  # source -> the number of its newest offer here
        outbox.send(encode(PoolHandle(0, self.pool.path, self.pool.form)))

    def metrics(self) -> dict[str, int | float]:
        own = {"held": len(self.core.held), "offers": len(self.core.offers), "arriving": int(self.pool.is_busy)}
        return super().metrics() | own

    def may_step(self) -> bool:
        """Also whether anything has changed since no step could be planned."""
        return not self.core.is_stuck and super().may_step()

    def pause(self) -> int | None:
        """A millisecond at most while blocks are on their way, whose arrival is no message."""
        limit = super().pause()
        return 1 if limit and self.core.is_waiting else limit

    def idle(self) -> None:
        super().idle()
        if self.core.is_waiting:
            self.core.is_stuck = False  # look again whether they are here

    def _ask(self, request_id: int, source: int, blocks: list[int]) -> None:
        self.send(Wanted(request_id, source, blocks))

    def _meet(self, message: PoolHandles) -> None:
        self.core.scheduler.max_len = message.max_len
        for number, path in sorted(message.pools.items()):
            self.pool.open(number, path)
        self.send(Met(0))

    def _sequence(self, message: Compute | Take) -> Sequence:
        size = self.core.config.spec.vocab_size
        top = max(message.token_ids, default=0)
        require(top < size, f"token id {top} exceeds the vocabulary of {size}: lower it")
        params = unpack_params(message.params)
        block_size = self.core.config.kv_cache_block_size
        return resume(message.token_ids, message.num_prompt_tokens, block_size, params, message.id)

    def _take(self, message: Take) -> None:
        """Queue an offer. One that comes twice, after an interrupt of the front, has been read."""
        if message.number > self.newest.get(message.source, 0):
            self.newest[message.source] = message.number
            offer = Offer(message.source, message.blocks, message.num_cached_tokens)
            self.unread.add(message.id)
            self.core.take(self._sequence(message), offer)

    def _release(self, request_id: int) -> None:
        self.core.release(request_id)
        self.offered.discard(request_id)

    def _handle(self, message: object) -> None:
        match message:
            case Compute():
                seq = self._sequence(message)
                self.core.prefill(seq) if message.is_passed else self.core.add(seq)
            case Take():
                self._take(message)
            case Release():
                self._release(message.id)
            case PoolHandles():
                self._meet(message)
            case Send():
                self.pool.send(message.target, message.blocks)
            case Gone():
                self.pool.lose(message.number)
                self.core.is_stuck = False
            case Abort():
                self.core.abort(message.id)
                self._release(message.id)
                self.unread.add(message.id)  # the front may have sent its offer, or not
            case _:
                super()._handle(message)

    def receive(self, frame: bytes) -> None:
        super().receive(frame)
        self._tell()

    def _tell(self) -> None:
        """Say what is held now, and what need not be held any more."""
        for request_id in [i for i in self.core.held if i not in self.offered]:
            self.offered.add(request_id)
            self.number += 1
            self.send(Held(request_id, self.number, self.core.held[request_id]))
        for request_id in self.unread - self.core.offers.keys():
            self.unread.remove(request_id)
            self.send(Pulled(request_id))

    def _report(self, step: StepOutput) -> None:
        super()._report(step)
        self._tell()


class Member(Replica):
    """The `CoreManager` of an engine of one kind."""

    reads: object = FromMember

    def __init__(self, number: int, recipe: Recipe, config: EngineFields, bell: SimpleQueue[None]) -> None:
        super().__init__(number, recipe, config, bell)
        roles = config.kv_transfer_config
        self.number = number
        self.share = len(roles)
        self.is_sender = roles[number]["kv_role"] == SENDER
        self.pool: PoolHandle | None = None
        self.has_met = False
        self.peers: list[Member] = []  # all engines, by number, when all are ready
        self.unread: set[int] = set()  # requests whose blocks it may be reading

    def _handle(self, message: object) -> str | None:
        """Handle a message. What is not read any more is released at once, whatever the caller's thread does."""
        match message:
            case Pulled():
                self.unread.discard(message.id)
                for peer in self.peers:
                    peer.send(Release(message.id))
            case Wanted():
                self.peers[message.source].send(Send(message.id, self.number, message.blocks))
            case PoolHandle():
                self.pool = message
            case Met():
                self.has_met = True
                self.bell.put(None)
            case _:
                return super()._handle(message)
        return None


class Apart(EngineCoreClient):
    """Engines that compute prompts, and engines that decode, behind one engine core.

    If one dies, its requests are computed again, once; with no engine left of a kind, the other
    kind does both. EngineDead when all have died.
    """

    config: EngineFields
    manager_type = Member
    causes: tuple[str, ...] = ()  # of the deaths

    def __init__(self, config: EngineFields) -> None:
        asked = config.recipe["options"]
        each = [asked | own_options(role) for role in config.kv_transfer_config]
        if not is_on_cpu(config):
            each = [own | {"device": device} for own, device in zip(each, devices_of(config), strict=True)]
        super().__init__(config, [config.recipe | {"options": own} for own in each])

    def __repr__(self) -> str:
        ready = self.engines[0].ready
        kinds = f"{len(self.kind(True))} x {SENDER}, {len(self.kind(False))} x {RECEIVER}"
        return f"{type(self).__name__}({kinds}: {ready and ready.core})"

    def kind(self, is_sender: bool) -> list[Member]:
        """The engines of a kind that live."""
        members = cast(list[Member], self.engines)
        return [member for member in members if member.is_sender == is_sender and member.dead is None]

    def _start(self, recipes: list[Recipe], meeting: str) -> None:
        """Start the processes, and let them meet. ValueError if their pools differ."""
        super()._start(recipes, meeting)
        members = cast(list[Member], self.engines)
        pools = {member.number: member.pool for member in members if member.pool}
        forms = {pool.form for pool in pools.values()}
        require(len(forms) == 1, f"kv_transfer_config: the engines' blocks differ: {sorted(forms)}")
        longest = min(member.ready.max_len for member in members if member.ready)
        for member in members:
            member.peers = [*members]
        for member in members:
            member.send(PoolHandles(0, longest, {number: pool.path for number, pool in pools.items()}))
        while not all(member.has_met for member in members):
            EngineCoreClient.check_alive(self)
            self.wait()

    def place(self, seq: Sequence) -> None:
        """Send a request, with the tokens it has, to the engine that computes its next one."""
        senders, receivers = self.kind(True), self.kind(False)
        found = [member for member in senders + receivers if seq.id in member.seqs]
        target = found[0] if found else least_loaded(cast(list[Replica], senders or receivers), seq)
        known = seq.token_ids[: seq.num_known_tokens]
        params = pack_params(seq.sampling_params)
        is_passed = bool(receivers) and target in senders
        frame = encode(Compute(seq.id, known, params, seq.num_prompt_tokens, is_passed))
        target.num_given += 1
        target.seqs[seq.id] = seq
        target.send(frame)

    def add(self, seq: Sequence) -> None:
        """Send a sequence to an engine; ValueError if it can never run."""
        self.scheduler.check(seq)
        self.check_open()
        self.check_alive()
        self.place(seq)

    def pass_on(self, sender: Member, held: Held) -> None:
        """Offer what a sender holds to a receiver. A second call, after an interrupt, offers it
        to the same one, which takes it once."""
        seq = sender.seqs.get(held.id)
        if seq is None:  # it was aborted
            return
        receivers = self.kind(False)
        if not receivers:
            sender.send(Release(seq.id))
            self.place(seq)
            return
        found = [member for member in receivers if seq.id in member.seqs]
        target = found[0] if found else cast(Member, least_loaded(cast(list[Replica], receivers), seq))
        known = seq.token_ids[: seq.num_known_tokens]
        params = pack_params(seq.sampling_params)
        offer = sender.number, held.number, held.blocks, seq.num_cached_tokens
        frame = encode(Take(seq.id, known, params, seq.num_prompt_tokens, *offer))
        target.num_given += not found
        target.unread.add(seq.id)
        target.seqs[seq.id] = seq
        target.send(frame)
        del sender.seqs[seq.id]

    def use_next(self, engine: CoreManager) -> StepOutput | None:
        """Use an engine's next message."""
        if isinstance(held := engine.messages[0], Held):
            self.pass_on(cast(Member, engine), held)
            engine.messages.popleft()
            return None
        return super().use_next(engine)

    def _finish(self, seq: Sequence, now: float) -> None:
        """Remove the request here and in its engine. If an interrupt has left it with two, the
        receiver may be reading, and says when the sender may release it."""
        owners = [member for member in cast(list[Member], self.engines) if seq.id in member.seqs]
        min(owners, key=lambda member: member.is_sender).send(Abort(seq.id))
        seq.status, seq.leave_time = SequenceStatus.FINISHED, now
        for owner in owners:
            del owner.seqs[seq.id]

    def check_alive(self) -> None:
        """Remove dead engines, and compute their requests again. EngineDead if all have died."""
        members = cast(list[Member], self.engines)
        dead = [member for member in members if member.dead is not None]
        if dead and len(dead) == len(members):
            close_all(self.engines)
            raise EngineDead("\n".join([*self.causes, *(str(member.dead) for member in members)]))
        for member in dead:
            self._bury(member)

    def _bury(self, member: Member) -> None:
        """Remove a dead engine. Its requests are computed again by others. One that has lost two engines ends."""
        lost = [*member.seqs.values()]
        warnings.warn(f"{len(lost)} requests are computed again: {member.dead}", stacklevel=5)
        for request_id in [*member.unread]:  # nobody reads them any more
            for peer in member.peers:
                peer.send(Release(request_id))
        for peer in member.peers:
            peer.send(Gone(0, member.number))
        for seq in lost:
            if seq.num_preemptions:
                self.abort(seq.id)
            else:
                seq.num_preemptions += 1
                self.place(seq)
                del member.seqs[seq.id]
        self.causes += (str(member.dead),)
        self.engines.remove(member)
