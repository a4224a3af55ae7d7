# %% 1
def fewest_tokens(replicas, seq):
    return min(replicas, key=lambda r: max(map(len, r.seqs.values())))
# %% 2
def with_promises(replica, seq):
    replica.hashes.update(chain(seq)[:2])
# %% 3
def served(p: float, n: int, lockstep: bool) -> float:
    return 1 - p * n if lockstep else 1 - p
