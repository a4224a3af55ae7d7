# %% 20_turns 1
class ThreeInARow(TurnScheduler):
    in_a_row = 0

    def _choose(self):
        self.last_was_prefill = self.in_a_row >= 2  # after two
        decodes, prompts = super()._choose()
        self.in_a_row = self.in_a_row + 1 if prompts else 0
        return decodes, prompts
# %% 20_turns 2
class ByTime(TurnScheduler):
    limit, last_decode = 0.1, 0.0

    def _choose(self):  # the time since the last turn, whether or not anything decoded
        self.last_was_prefill = time.perf_counter() - self.last_decode >= self.limit
        self.last_decode = time.perf_counter()
        return super()._choose()
# %% 20_turns 2
class ByTime(TurnScheduler):
    limit = 0.1

    def _choose(self):  # the age of the oldest request in the queue
        now = time.perf_counter()
        self.last_was_prefill = any(now - s.arrive_time >= self.limit for s in self.waiting)
        return super()._choose()
# %% 20_turns 3
def largest_budget(limit, step, token):
    return int((limit - step) / token) // 2
# %% 23a_overlap 1
class DeepCore(OverlapCore):
    def step(self):
        with self.transaction():
            while len(self.in_flight) < 2 and (scheduled := self.scheduler.schedule()):
                batch, seqs = scheduled
                self._launch(batch, [*seqs.values()])
        return super().step()
# %% 23a_overlap 2
class UnorderedDevice(WritingDevice):
    def write(self, i, slots, old, is_late):
        if not is_late:  # never made, so nobody is harmed
            super().write(i, slots, old, is_late)
# %% 23a_overlap 2
class UnorderedDevice(WritingDevice):
    held = None
    def run(self, batch):  # delays whole steps: a request misses its own keys
        if self.held is None:
            self.held = batch
            return ScheduledBatchOutput({i: (n,) for i, n in sampled(batch)})
        held, self.held = self.held, None
        output = super().run(batch)
        super().run(held)
        return output
# %% 23b_launching 1
class Buffers:
    def __init__(self, make):
        self.three, self.count = [make(), make(), make()], 0

    def take(self):
        self.count += 1
        return self.three[self.count % 3]  # in turn, whoever still uses it

    def give(self, buffer):
        pass
# %% 23b_launching 2
def fill_in(ids, num_tokens, rows, pool):
    filled, start = [], 0
    for n, row in zip(num_tokens, rows, strict=True):
        run = ids[start : start + n]
        known = [i for i in run if i != PLACEHOLDER]
        filled += known + pool[row, : n - len(known)].tolist()  # the oldest
        start += n
    return filled
# %% 40_radix_cache 1
prompt = [1, 2, 3, 4]
# %% 40b_longest_prefix 1
load = [[1] * 9, [2] * 9, [1] * 8 + [3], [2] * 8 + [4]]  # both find the same
times = [0, 0, 0, 0]
# %% 41_spyre 1
class ByArrival(SpyreScheduler):
    def _unpaused(self, decoding):
        return super()._unpaused(sorted(decoding, key=lambda s: s.id))  # which takes turns
# %% 41_spyre 1
class ByArrival(SpyreScheduler):
    def _unpaused(self, decoding):
        return [min(decoding, key=lambda s: s.id)]  # the others would fit beside it
# %% 41b_spyre_runner 1
def second_run(n, cached):
    skipped = min(cached, n - 1) // 64 * 64  # every cached block, not only whole chunks
    return n - skipped, 0
# %% 41b_spyre_runner 2
class ColumnPositions(RectangularRunner):
    def prepare_model(self, batch):
        ids, positions, meta, rows = super().prepare_model(batch)
        return ids, positions * 0, meta, rows  # other logits, but not those of the columns

first_length = 23
# %% 41c_looking_ahead 1
third = (3, 2, 8, 8)  # it fits without the block, too
# %% 42_host_pool 1
def position(weights, numbers, layers, heads, dim, link=LINK, peak=PEAK):
    needed = 2 * numbers / link * peak
    return max(0, (needed - 2 * weights) / (2 * layers * heads * dim))  # one product of two
# %% 42_host_pool 2
load = [[n] * 17 for n in range(2)] * 6  # both pools hold them
