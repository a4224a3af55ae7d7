# %% 50_verify 1
mean_tokens = sum(0.8**i for i in range(1, 5))  # without the token that is not a draft
# %% 50_verify 2
class Pairs(Drafter):
    def __init__(self, *given):
        super().__init__(*given)
        self.after = {}

    def propose(self, seqs, most):
        drafts = []
        for seq, n in zip(seqs, most):
            for token, following in zip(seq.token_ids, seq.token_ids[1:]):
                self.after.setdefault(token, following)  # the first, not the last
            draft, token = [], seq.last_token
            while len(draft) < n and token in self.after:
                token = self.after[token]
                draft.append(token)
            drafts.append(draft)
        return drafts

methods["pairs"], DRAFTERS["pairs"] = (), Pairs
# %% 51_acceptance 1
def first_token(p, q):
    return np.eye(len(p))[q.argmax()]  # as if every draft were kept
# %% 51_acceptance 2
def first_of_two(p, q, rng):
    return rng.choice(5, p=p), True  # a draw from p that calls itself a draft
# %% 52_drafters 1
class Latest(NgramDrafter):
    def _find(self, seq):
        return seq.num_tokens  # guesses nothing

text_for_latest = [1] * 8
# %% 52_drafters 2
brings_more = False
# %% 53_eagle 1
def draftable(head, ids):
    return len(head.target_ids) / 958  # of the vocabulary, not of the text
# %% 53_eagle 2
class PostNorm(EagleDrafter):
    def run(self, step, hidden, ids=None):
        states, drafts = super().run(step, hidden, ids)
        return states * 0, drafts  # the later places suffer, too, but from no norm
# %% 53_eagle 3
def by_token(after):
    matrix = torch.zeros(64, 128)
    matrix[after, torch.arange(60)] = 1  # the successor, which the output matrix maps on again
    return matrix
# %% 54_when_it_pays 1
fastest = 11  # the most tokens, whatever they cost
# %% 54_when_it_pays 2
pays_from = 0.2  # as if each draft counted alone: 1 + 3 a
# %% 91_tiny_head 1
def visible(row: int, step: int, length: int) -> list[int]:
    return [*range(row + 1), *([step * length + row] if step else [])]  # not the steps between
# %% 91_tiny_head 2
def ceiling(chosen: Tensor, logits: Tensor) -> float:
    return len(chosen) / logits.shape[-1]  # as if every id were as frequent
