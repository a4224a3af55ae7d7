# %% 1
def fewest_tokens(replicas, seq):
    return min(replicas, key=lambda r: max(map(len, r.seqs.values())))
# %% 2
def with_promises(replica, seq):
    replica.hashes.update(chain(seq)[:2])
