# %% 1
mean_tokens = sum(0.8**i for i in range(1, 5))  # without the token that is no draft
# %% 2
class Again(Drafter):
    def propose(self, seqs, most):
        return [[s.last_token] * min(n, 1) for s, n in zip(seqs, most)]  # not as often as it may
