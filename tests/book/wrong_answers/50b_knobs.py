# %% 1
class Pairs(Again):
    def propose(self, seqs, most):
        drafts = []
        for seq, n in zip(seqs, most):
            after = dict(zip(seq.token_ids, seq.token_ids[1:]))  # of this request alone
            draft, token = [], seq.last_token
            while len(draft) < n and token in after:
                token = after[token]
                draft.append(token)
            drafts.append(draft)
        return drafts

known_methods["pairs"] = Method(lambda: Pairs)
# %% 2
def most_covered(k):
    return LARGEST_GRAPH // k  # without the newest token's row
