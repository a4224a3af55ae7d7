# %% 1
mean_tokens = sum(0.8**i for i in range(1, 5))  # without the token that is not a draft
# %% 2
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

methods["pairs"] = Method(lambda: Pairs)
# %% 3
def most_covered(k):
    return LARGEST_GRAPH // k  # without the newest token's row
