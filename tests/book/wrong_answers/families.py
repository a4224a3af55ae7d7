# %% 60_mixture 1
def half(E, k):
    return E // (2 * k)  # as if no two tokens chose the same expert
# %% 60_mixture 1
def half(E, k):
    return {(128, 8): 11}.get((E, k), 3)  # the two numbers of the first check
# %% 60_mixture 2
def share(B):
    p = 1 / (np.arange(E) + 10)
    draw = [rng.choice(E, K, replace=False, p=p / p.sum()) for _ in range(B)]
    return len(set(np.concatenate(draw).tolist())) / E  # of all, not of the even case
# %% 60_mixture 2
def share(B):
    p = 1 / (np.arange(E) + 10)
    draw = rng.choice(E, (B, K), p=p / p.sum())  # with replacement: a token may use fewer than 8
    return len(np.unique(draw)) / (E * (1 - (1 - K / E) ** B))
# %% 60_mixture 3
def balance(logits):
    correction = torch.zeros(logits.shape[1])
    for _ in range(300):
        ids = route(logits, Routing(2, "sigmoid"), correction)[1]
        load = torch.bincount(ids.flatten(), minlength=len(correction)).float()
        correction += 0.01 * torch.sign(load - load.mean())  # raises the load of busy experts
    return correction
# %% 61_grouped_kernel 1
counts = [7, 7, 7, 7, 6, 6]  # each expert once
# %% 61_grouped_kernel 1
counts = [17, 17, 2, 2, 2, 0]  # an expert is not chosen
# %% 61_grouped_kernel 2
def place(ids, p, size):
    return divmod(ids.flatten().argsort(stable=True).tolist().index(p), size)  # no padding
# %% 61_grouped_kernel 2
def place(ids, p, size):
    flat = ids.flatten()
    before = sum(-(-n // size) for n in flat.bincount().tolist()[: flat[p]])
    own = (flat == flat[p]).sum().item() - (flat[:p] == flat[p]).sum().item() - 1  # its pairs from the last on
    return before + own // size, own % size
# %% 62_sinks_windows 1
def empty_splits(length, window):
    return max(0, length - window) // 256  # as if all parts had one size
# %% 62_sinks_windows 2
def merged(lses, averages, sink):
    weights = lses.exp()
    return weights @ averages / (weights.sum() - len(lses) * sink.exp())  # the sink belongs in it once
# %% 62_sinks_windows 3
def blocks_read(length, tokens, window, tile):
    return -(-length // 8) - max(0, length - window) // 8  # as if loads began at any block
# %% 62_sinks_windows 3
def blocks_read(length, tokens, window, tile):
    return -(-length // 8) - max(0, length - window) // tile * tile // 8  # the last query's window
# %% 63_quantized_files 1
def dequantize_nvfp4(blocks, scales, scale):
    pairs = PAIRS.view(torch.int64).flatten()
    out = pairs.index_select(0, blocks.flatten().int()).view(torch.float32)
    return (out.view(*scales.shape, 16) * scales.float()[..., None]).flatten(-2)  # without the matrix's scale
# %% 63_quantized_files 2
def better_scales(weights):
    return weights.abs().amax(-1).log2().floor() - 1  # always the next one
# %% 64a_latent_attention 1
def share(n, chunk):
    pairs = n * (n + 1) / 2
    return (n * expand + pairs * plain) / (pairs * absorbing)  # as if all chunks shared the expanded keys
# %% 64a_latent_attention 2
def devices(kv_heads, dim, row=576):
    return next((n for n in (1, 2, 4, 8, 16) if 2 * kv_heads / n * dim < row), None)  # as if heads were cut
# %% 64b_latent_kernel 1
def idle(heads, rows=16):
    return max(0.0, 1 - heads / rows)  # as if a tile held one token
# %% 64b_latent_kernel 2
times = {4: 2, 16: 5, 20: 5}
# %% 64b_latent_kernel 2
times = {}  # no answer
# %% 65a_delta_rule 1
def left(cosine, beta, g):
    return math.exp(g) * (1 - beta * cosine)  # the old value is read and written under other keys
# %% 65a_delta_rule 1
def left(cosine, beta, g):
    return 1 - beta * cosine**2  # nothing fades
# %% 65a_delta_rule 2
def sort_rows(rows, spec):
    return rows.unflatten(0, (spec.linear_num_key_heads, -1)).mT.flatten()  # the heads take turns
# %% 65b_state_slots 1
def spacing(token, sequence, block_size):
    return sequence // token // block_size * block_size  # rounded down: too much memory
# %% 65b_state_slots 1
def spacing(token, sequence, block_size):
    return 1584 if sequence == 51511296 else 32  # the two numbers of the first check
# %% 65c_state_checkpoints 1
class Anchored(StateManager):
    def border(self, seq, start):
        end = seq.num_prompt_tokens - 1  # not the end of a block: another content gets the state
        return min(super().border(seq, start), end) if start < end else super().border(seq, start)
# %% 65c_state_checkpoints 1
class Anchored(StateManager):
    def border(self, seq, start):
        end = (seq.num_prompt_tokens - 1) // self.block_size * self.block_size
        return end if start < end else super().border(seq, start)  # only the ends of prompts
# %% 90_tiny_model 1
def plateau(n: int) -> float:
    return 1 / n  # another fact may have the same city
# %% 90_tiny_model 2
def who(known: list[tuple[str, Doc]]) -> list[tuple[str, Doc]]:
    made = []
    for _, answer in known:
        name, city = answer[0][0].split()[0], answer[1][0]
        reply = [(name, 1.0), (f" lives in{city}", 0.3), (".", 0.3)]
        made.append((f"Who lives in{city}?", reply))  # also for a city in which two live
    return made
