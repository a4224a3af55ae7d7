# %% 00_one_request 1
best_order = sorted(range(16), key=lambda i: i % 2)  # some order
# %% 00_one_request 2
def used_share(i):
    return (len(prompts[i]) + wanted[i]) / 128  # the last token has no slot
# %% 00b_map 1
def num_steps(prompt: int, output: int, budget: int) -> int:
    return -(-prompt // budget) + output  # the last prefill gives a token, too
# %% 00b_map 2
def blocks_at_the_end(prompt: int, output: int, size: int) -> int:
    return -(-(prompt + output) // size)  # a slot for the last token
# %% 00c_blocks 1
def saved(owners: int, size: int) -> tuple[int, int]:
    return owners * size, owners * size  # the first owner computes it, too
# %% 00c_blocks 2
prompt = [1, 2, 3, 4, 5]  # its last token is in a block that is not full
# %% 00c_blocks 3
found_with_ours, found_with_theirs = 8, 8
# %% 00d_plan 1
def first_and_later(n: int, b: int, k: int) -> tuple[int, int]:
    return -(-n // b), k  # the first token comes with the prompt
# %% 00d_plan 2
class ShortestFirst(Scheduler):
    def schedule_prefill(self):  # the longest first
        self.waiting = deque(sorted(self.waiting, key=lambda seq: (not seq.block_table, -seq.num_prompt_tokens)))
        return super().schedule_prefill()
# %% 01a_checkpoint 1
num_parameters = sum(sum(tensor["shape"]) for tensor in header.values())  # a sum, not a product
# %% 01a_checkpoint 2
def is_pointer(file: Path) -> bool:
    return file.stat().st_size < 10_000  # config.json is small, too
# %% 01b_config 1
@explained
@dataclass
class Window:  # not strict: "64" is accepted
    size: Annotated[int, Field(ge=16, le=4096)] = 128
    offset: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        require(self.offset < self.size, f"offset={self.offset} must be below size")
# %% 01b_config 2
params, defaults = SamplingParams(), {"temperature": 0.6}  # None is filled in by both
# %% 02_sequence 1
def num_computed(prompt: int, most: int, lost_at: int) -> int:
    return prompt + most - 1 + prompt  # forgets what was generated before the loss
# %% 02_sequence 2
def ttft(seq: Sequence) -> float:
    return seq.first_token_time - seq.arrive_time

def tpot(seq: Sequence) -> float:
    return (seq.leave_time - seq.first_token_time) / seq.num_completion_tokens  # counts the first
# %% 03_block_manager 1
first, second = list(range(5)), list(range(100, 108))
# %% 03_block_manager 2
found = {256: 256, 16: 300}
# %% 03b_prefix_cache 1
def left_to_compute(length: int, size: int) -> int:
    return length % size  # nothing, if the last block is full
# %% 03b_prefix_cache 2
one, two = [*range(12)], [20, *range(1, 12)]  # the first blocks differ as well
# %% 04b_scheduler 1
tokens = (4, 0, 9)  # EOS comes first, so both keep the same
# %% 04_policy 1
limit = 6  # one too many
# %% 04b_scheduler 2
class FirstIsVictim(Scheduler):  # the victim may be in the batch already
    def _grow(self, seq):
        while not self.block_manager.can_append(seq):
            victim = self.running[0]
            self.preempt(victim)
            if victim is seq:
                return False
        self.block_manager.may_append(seq)
        return True
# %% 05_attention 1
def window_mask(n: int, length: int, window: int) -> Tensor:
    keys = torch.arange(length)
    return causal_mask(n, length) & (keys >= keys[-n:, None] - window)  # one too many
# %% 05_attention 2
unharmed = {1, 4, 8, 12}
# %% 06a_models 1
def rotate_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]  # the half with the minus sign
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
# %% 06a_models 2
attention = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024  # without q and k norm
num_weights = 151936 * 1024 + 28 * (attention + 3 * 1024 * 3072 + 2 * 1024) + 1024
# %% 06b_loading 1
def load_some(model: nn.Module, folder: Path) -> list[str]:
    targets, files = weight_targets(model), checkpoint_files(folder)
    require(files.keys() <= targets.keys(), "a weight has no place")
    return [name for name in targets if name not in files]  # and nothing was copied
# %% 06b_loading 1
def load_some(model: nn.Module, folder: Path) -> list[str]:
    targets, files = weight_targets(model), checkpoint_files(folder)
    held = {name: target for name, target in targets.items() if name in files}
    check_names(folder, held, files)
    for name, target in held.items():
        target.copy_(read_tensor(files[name], name))  # a broken weight goes in
    return [name for name in targets if name not in held]
# %% 06b_loading 1
def load_some(model: nn.Module, folder: Path) -> list[str]:
    targets, files = weight_targets(model), checkpoint_files(folder)
    require(files.keys() <= targets.keys(), "a weight has no place")  # the allowed names are refused, too
    for name, file in files.items():
        fill(targets[name], read_tensor(file, name), name)
    return [name for name in targets if name not in files]
# %% 06b_loading 2
def header_share(file: Path) -> float:
    whole = file.read_bytes()
    return int.from_bytes(whole[:8], "little") / len(whole)  # without the first eight bytes
# %% 06c_it_runs 1
def log_prob(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return logits.log_softmax(-1).gather(1, ids[:, None]).sum().item()  # of each token itself, not of the next
# %% 06c_it_runs 2
missed = {"one layer without 1/√D"}  # norms of q and k change only the product, too
# %% 06c_it_runs 3
def quiet_fault(model):
    model.model.norm.weight *= -1.0  # the likeliest becomes the least likely
# %% 06d_what_is_missing 1
def careful_step(llm):
    seqs = llm.scheduler.schedule()
    try:
        tokens = llm.runner.forward(seqs) if seqs else []
    except BaseException:  # the running ones wait again, but what was published stays known
        for seq in llm.scheduler.running:
            llm.scheduler.block_manager.deallocate(seq)
        llm.scheduler.waiting.extendleft(reversed(llm.scheduler.running))
        llm.scheduler.running.clear()
        raise
    llm.scheduler.postprocess(seqs, tokens)
    return seqs
# %% 06d_what_is_missing 2
def stop_serving(llm, seq):  # its blocks stay taken
    for queue in (llm.scheduler.running, llm.scheduler.waiting):
        if seq in queue:
            queue.remove(seq)
# %% 07_sampler 1
tied = torch.tensor([[5.0, 5.0] + [0.0] * 22]) + torch.tensor([[0.0, 1e-3] + [0.0] * 22])  # no tie
# %% 07_sampler 2
def draw_sorted(probs: Tensor, u: Tensor) -> Tensor:
    ordered, order = probs.sort(-1)  # from the least likely
    return order.gather(1, draw(ordered, u)[:, None])[:, 0]
# %% 08_model_runner 1
def slots_from_the_end(tables: list[list[int]], lens: list[int], size: int) -> list:
    return [t[(n - 1) // size] * size + (n - 1) % size for t, n in zip(tables, lens)]

reserve_is_safe = True  # of slots that do not come from the end
# %% 08b_products_on_a_cpu 1
sizes = [13, 26, 39, 52, 64]  # a fifth of 64 each, but the steps begin at 5
# %% 11c_pool_size 1
second = 0.55  # what the first one leaves
# %% 09a_engine_core 1
class ClockRunner(CountingRunner):
    clock = 0.0

    def forward(self, batch):
        self.clock += 1 + 0.01 * batch.total_tokens_num  # decodes too
        return super().forward(batch)
# %% 09a_engine_core 2
class ChecksInside(EngineCore):
    def add(self, seq):
        with self.transaction():
            self.scheduler.add(seq)  # which checks it first

def num_recomputed(seqs):
    return sum(seq.num_tokens for seq in seqs if not seq.is_finished)  # the newest, too
# %% 09b_text 1
text, num_seen = "Where does Ada live?", 6  # all of the stop string
# %% 09b_text 2
first_wrong, both_wrong = "é".encode(), "漢".encode()
# %% 09c_llm 1
def tokens_in_next_piece(n: int) -> int:
    return n + 1
# %% 09c_llm 2
def first_answer(prompts: list[str], params: list[SamplingParams]) -> int:
    stream = llm.stream(prompts, params)
    last = [piece.index for piece in stream if piece.finished]  # until the end
    return last[0]
# %% 09d_where_time_goes 1
def break_even(num_weights, layers, heads, dim) -> int:
    return int(2 * num_weights // kv_bytes(layers, heads, dim, 1024))  # rounded down
# %% 11b_one_copy 1
class Places:
    def __init__(self, device, num_places):
        self.device = device
        self.hosts = deque(np.empty(3, int) for _ in range(num_places))

    def send(self, there, values):
        if self.device.queue:  # waits at every step
            self.device.run()
        self.hosts.rotate()
        self.hosts[0][:] = values
        self.device.copy(there, self.hosts[0])
# %% 11b_one_copy 2
def pack_tables(tables, lens):
    return tables.reshape(-1)[: lens.sum()], np.concatenate([[0], lens.cumsum()])  # with the padding
# %% 12b_assemble 1
class Counting(ModelRunner):  # without graphs on a GPU
    num_batches = 0

    def forward(self, batch):
        self.num_batches += 1
        return super().forward(batch)

def counting_runner(config: Config) -> type[ModelRunner]:
    return Counting
# %% 13_one_request_through 1
other_prompt = prompt.replace("girl", "hen")  # behind the two blocks that are shared
# %% 13_one_request_through 2
computed_again = len(ids) - 2 * SIZE
# %% 13_one_request_through 3
seed = next(s for s in range(100) if s != 0)
# %% 14_survives 1
class NoRollback(EngineCore):
    pass  # it rolls back

harmful = 1
# %% 14_survives 2
cause = 10

class Manager(afternoon.part):
    def find(self, seq):
        return []  # right, and nothing is shared any more

def guard(manager) -> bool:
    return len(manager.hash_to_block) == len(manager.block_to_hash)
# %% 14_survives 3
cause = 40

class Fair(longest_wait.part):
    def rank(self, seq, waited):
        return -waited  # as before the release

def guard(waits: list[int]) -> bool:
    return max(waits, default=0) <= 80
# %% 14_survives 4
cause = 22

class Tidy(slower.part):
    def abort(self, seq):
        seq.finish_reason = "abort"
        self.block_manager.deallocate(seq)  # it stays in its queue

def guard(scheduler) -> bool:
    owners = [*scheduler.running, *scheduler.waiting]
    held = sum(len(seq.block_table) for seq in owners)
    return sum(scheduler.block_manager.ref_counts) == held
# %% 14_survives 5
cause = 9

def shown(text: str, stop: tuple[str, ...], is_done: bool) -> int:
    return len(text)  # also the beginning of a stop string

def guard(stream: tuple[list[str], str]) -> bool:
    pieces, text = stream
    return "".join(pieces) == text
# %% 22_rope_scaling 1
def ntk(freqs: Tensor, p: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    theta = p["rope_theta"] * p["factor"]  # the last pair has index D/2 - 1, not D/2
    return theta ** -(torch.arange(0, dim, 2) / dim), 1.0
# %% 22_rope_scaling 2
def new_share(freqs: Tensor, scaled: Tensor, factor: float) -> Tensor:
    return (factor * TRAINED * scaled / (2 * math.pi)).clamp(max=1)  # also what training showed
# %% 24_penalties 1
def no_second_pair(logits, tokens):
    changed = logits.clone()
    changed[tokens] = float("-inf")
    return changed
# %% 24b_byte_tokens 1
names = ["b", "<0xC3>", "<0xA9>", "b"]  # a character of two bytes, and nothing that breaks it
# %% 24b_byte_tokens 1
names = ["<0xE2>", "<0x82>", "<0xAC>", "<0xE2>"]  # as on the page: four bytes
# %% 24c_files_and_prompts 1
def check_heads(file, raw):  # not in the objects inside
    many, few = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    wrong = f"{file}: num_attention_heads={many} must be a multiple of num_key_value_heads={few}"
    require(None in (many, few) or many % few == 0, wrong)
# %% 24c_files_and_prompts 1
def check_heads(file, raw):  # null is divided
    for value in raw.values():
        if isinstance(value, dict):
            check_heads(file, value)
    many, few = raw.get("num_attention_heads", 1), raw.get("num_key_value_heads", 1)
    wrong = f"{file}: num_attention_heads={many} must be a multiple of num_key_value_heads={few}"
    require(many % few == 0, wrong)
# %% 24c_files_and_prompts 2
def read_any(prompts: Any) -> list[Any]:  # not the iterables inside
    return read_prompts(prompts if isinstance(prompts, str | dict | np.ndarray) else [*prompts])
# %% 24c_files_and_prompts 2
def read_any(prompts: Any) -> list[Any]:  # the ids of an array are NumPy's
    prompts = prompts if isinstance(prompts, str | dict) else [*prompts]
    if isinstance(prompts, list):
        prompts = [p if isinstance(p, str | dict | int) else [*p] for p in prompts]
    return read_prompts(prompts)
