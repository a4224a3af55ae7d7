# %% 50_verify 1
def speculate_until(draft, n, end):  # nano-vLLM's PR 147: only a step's last token is checked
    tokens, steps = list(prompt), 0
    while len(tokens) < len(prompt) + n and tokens[-1] != end:
        drafts = draft(tokens)
        found = likeliest([*tokens, *drafts], 1 + len(drafts))
        right = 0
        while right < len(drafts) and drafts[right] == found[right]:
            right += 1
        tokens += found[: right + 1]
        steps += 1
    return tokens[len(prompt) :][:n], steps
# %% 50_verify 1
def speculate_until(draft, n, end):  # the first call makes the steps after the end
    found, _ = speculate(draft, n)
    return speculate(draft, found.index(end) + 1 if end in found else n)
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
# %% 52_drafters 1
class Latest(NgramDrafter):
    def _find(self, seq):
        tokens, end = seq.token_ids, seq.num_tokens
        for place in range(end - 1, 1, -1):
            if tokens[place - 2 : place] == tokens[-2:]:  # matches of two only
                return place
        return end

text_for_latest = [1] * 8
# %% 52_drafters 1
class Latest(NgramDrafter):
    def _find(self, seq):
        tokens, end = seq.token_ids, seq.num_tokens
        for n in reversed(self.sizes):
            for place in range(end - 1, n - 1, -1):
                if tokens[place - n : place] == tokens[-n:]:
                    return place
        return end

    def propose(self, seqs, most):
        return [draft[:1] for draft in super().propose(seqs, most)]  # the right place, one token

text_for_latest = [1, 2, 1, 2, 1, 2]
# %% 52_drafters 2
class Both(DraftModel):
    def __init__(self, config, runner, make_runner):
        super().__init__(config, runner, make_runner)
        self.lookup = NgramDrafter(EngineArgs(speculative_config={}))

    def propose(self, seqs, most):
        made = super().propose(seqs, most)  # also for those for which the lookup finds something
        return [a or b for a, b in zip(self.lookup.propose(seqs, most), made)]

    def keep(self, alive):
        super().keep(alive)
        self.lookup.keep(alive)
# %% 52_drafters 2
class Both(DraftModel):
    def __init__(self, config, runner, make_runner):
        super().__init__(config, runner, make_runner)
        self.lookup = NgramDrafter(EngineArgs(speculative_config={}))

    def propose(self, seqs, most):  # and no `keep`: the lookup never forgets
        found = self.lookup.propose(seqs, most)
        made = super().propose(seqs, [0 if draft else n for draft, n in zip(found, most)])
        return [a or b for a, b in zip(found, made)]
# %% 53_eagle 1
class Sure(EagleDrafter):
    def guess(self, seqs, place):
        drafts = super().guess(seqs, place)
        shares = self.model.compute_logits(self.last[0]).softmax(-1).amax(-1)
        for seq, share in zip(seqs, shares.tolist()):
            self.num_sure[seq.id] += share >= 0.5  # also behind one that is not sure
        return drafts

    def propose(self, seqs, most):
        self.num_sure = {seq.id: 0 for seq in seqs}
        drafts = super().propose(seqs, most)
        return [draft[: self.num_sure[seq.id]] for seq, draft in zip(seqs, drafts)]
# %% 53_eagle 2
class PostNorm(EagleDrafter):
    def run(self, step, hidden, ids=None):
        states, drafts = super().run(step, hidden, ids)
        return states * 0, drafts  # the later places suffer, too, but from no norm

first_to_suffer = 2
# %% 53_eagle 2
class PostNorm(EagleDrafter):
    def run(self, step, hidden, ids=None):
        states, drafts = super().run(step, hidden, ids)
        return self.model.norm(states, None)[0], drafts

first_to_suffer = 3  # one too late
# %% 53b_mtp 1
second_proj = fit(  # from the target's states, which a second module does not get
    [joined(ids[2:], states[1:-1]) for ids, _, states in train],
    [entering[2:] for _, entering, _ in train],
)
# %% 53b_mtp 2
def module_alone(ids, states):
    rows = [module(ids[i : i + 1], states[i : i + 1]) for i in range(len(ids))]
    return torch.cat(rows)  # right, but one pass per row
# %% 54_when_it_pays 1
def best_k(a, V, c):
    k = 0  # goes on only while the next draft pays by itself
    while k + 1 < len(V) and (
        expected(a, k + 1) / (V[k + 1] + (k + 1) * c) > expected(a, k) / (V[k] + k * c)
    ):
        k += 1
    return k
# %% 54_when_it_pays 2
def break_even(k, V, c):
    low, high = 0.0, 1.0  # never says that drafts cannot pay
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, k) < V + k * c else (low, middle)
    return high
# %% 54_when_it_pays 2
def break_even(k, V, c):
    a = (V + k * c - 1) / k  # as if each draft could be right after a wrong one
    return a if a <= 1 else None
# %% 54b_adaptive 1
def share_of(accepted, k):
    # as if every step had looked at one draft more than it accepted
    return sum(accepted) / sum(count + 1 for count in accepted)
# %% 54b_adaptive 2
class TableChooser(RuleChooser):
    def __init__(self, places, table):
        super().__init__(places)
        self.table = table

    def _decide(self, worth, seconds, drafting):
        drafts = self.table.get(len(worth), 0)  # only for the sizes in the table
        return [min(drafts, len(gains)) for gains in worth]
# %% 54b_adaptive 2
class TableChooser(RuleChooser):
    def __init__(self, places, table):
        super().__init__(places)
        self.table = table

    def _decide(self, worth, seconds, drafting):
        sizes = [size for size in self.table if size <= len(worth)]
        return [self.table[max(sizes)] if sizes else 0 for _ in worth]  # more than a request may have
# %% 91_tiny_head 1
def visible(row: int, step: int, length: int) -> list[int]:
    return [*range(row + 1), *([step * length + row] if step else [])]  # not the steps between
# %% 91_tiny_head 2
def ceiling(chosen: Tensor, logits: Tensor) -> float:
    return len(chosen) / logits.shape[-1]  # as if every id were as frequent
