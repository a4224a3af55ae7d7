# %% 70_engine_process 1
class Matrix(Message):
    shape: list[Size]
    data: bytes

    def unpack(self):
        return np.resize(np.frombuffer(self.data, np.float32), self.shape)  # repeats what there is
# %% 70_engine_process 1
class Matrix(Message):
    shape: list[Size]
    data: bytes

    def unpack(self):
        return np.frombuffer(self.data, np.float32).reshape(self.shape)  # NumPy counts numbers, not bytes
# %% 70_engine_process 2
class TwoInboxes(EngineCoreProc):
    early = frozenset()

    def _handle(self, message):  # remembers every abort, also of what has ended
        match message:
            case Add() if message.id in self.early:
                return
            case Abort():
                self.early |= {message.id}
        super()._handle(message)
# %% 70_engine_process 2
class TwoInboxes(EngineCoreProc):
    early = None

    def _handle(self, message):  # takes an abort of what has run for one that is early
        if isinstance(message, Abort) and message.id not in self.core.scheduler.seqs:
            self.early = message.id
        elif not isinstance(message, Add) or message.id < (self.early or 0):
            super()._handle(message)
# %% 70b_deaths 1
def worst(limit: float) -> float:
    return limit
# %% 70b_deaths 1
def worst(limit: float) -> float:
    return limit + 2 * TICK  # the clock was read before the last wait
# %% 70b_deaths 2
def named(ends: dict[int, float], pause: float) -> list[int]:
    return [rank for rank, at in ends.items() if at <= pause]
# %% 71a_shards 1
def argmax_of_all(group, part):
    value, place = part.max(0)
    best = group.all_gather(torch.stack([value.double(), place.double()]))
    return int(best[best[:, 0].argmax(), 1])  # the place in its own part
# %% 71a_shards 1
def argmax_of_all(group, part):
    value, place = part.max(0)
    mine = torch.stack([value.double(), place.double() + group.rank * len(part)])
    return int(group.all_gather(mine)[-1, 1])  # always the last rank's
# %% 71a_shards 2
def share_of_sums(tokens, ranks):
    compute_ms = 2 * 70.6e9 * tokens / (2 * 989e12) * 1e3
    return bytes_ms(tokens, ranks, 450e9) / compute_ms  # as if two GPUs computed
# %% 71b_experts 1
def visited(ranks: int, experts: int, k: int) -> float:
    return ranks * (1 - (1 - 1 / ranks) ** k)  # as if an expert could be chosen twice
# %% 71b_experts 2
def imbalance(ids, experts, ranks):
    tokens = torch.bincount(ids.flatten(), minlength=experts)
    return (tokens.max() / tokens.float().mean()).item()  # of the experts, not of the ranks
# %% 71c_ranks 1
def news(known, tables):
    old = {id: len(known.get(id, [])) for id in tables}
    return {id: (old[id], ids[old[id] :]) for id, ids in tables.items() if len(ids) > old[id]}  # as if tables only grew
# %% 71c_ranks 2
def follow(last: int, frame: bytes) -> int:
    return decode_frame(frame, Step).id
# %% 71c_ranks 3
def late_ranks(entered, now, limit):  # each rank's own last time, whether or not another one waits
    newest = max(map(len, entered))
    return [r for r, times in enumerate(entered) if len(times) < newest and now - times[-1] > limit]
# %% 71c_ranks 3
def late_ranks(entered, now, limit):  # the wait counts from the last rank that came
    newest = max(map(len, entered))
    last = max((times[-1] for times in entered if len(times) == newest > 0), default=now)
    return [r for r, times in enumerate(entered) if len(times) < newest and now - last > limit]
# %% 72a_replicas 1
def fewest_tokens(replicas, seq):
    return min(replicas, key=lambda r: max(map(len, r.seqs.values())))
# %% 72a_replicas 2
def promise(replica, seq):
    had = {*replica.hashes}
    replica.hashes.update(chain(seq)[:3])  # not the last block
    return lambda: replica.hashes.intersection_update(had)
# %% 72a_replicas 2
def promise(replica, seq):
    replica.hashes.update(chain(seq))
    return replica.hashes.clear
# %% 72a_replicas 2
def promise(replica, seq):
    had = {*replica.hashes}
    replica.hashes.update(chain(seq))
    return lambda: replica.hashes.intersection_update(had)  # forgets what the engine reports meanwhile
# %% 72a_replicas 3
def served(p: float, n: int, lockstep: bool) -> float:
    return 1 - p * n if lockstep else 1 - p
# %% 72a_replicas 3
def served(p: float, n: int, lockstep: bool) -> float:
    return 0.92274469 if lockstep else 1 - p  # the number of the first check
# %% 72b_lockstep 1
def wasted(steps: list[int]) -> float:
    return sum(max(steps) - n for n in steps) / sum(steps)
# %% 72b_lockstep 2
events = [(0, "hears"), (1, "hears"), (0, "sleeps"), (1, "sleeps")]
# %% 73_apart 1
def senders(n, prompt, answer, fast, slow):
    return max(1, min(n - 1, round(n * prompt / (prompt + answer))))  # as if both kinds were equally fast
# %% 73_apart 1
def senders(n, prompt, answer, fast, slow):
    best = n * (prompt / fast) / (prompt / fast + answer / slow)
    return min(max(1, -int(-best // 1)), n - 1)  # always rounded up
# %% 73_apart 2
load = [[1] * 8, [1] * 8, [1] * 8]  # all find the same blocks
