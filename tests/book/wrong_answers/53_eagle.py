# %% 1
def draftable(head, ids):
    return len(head.target_ids) / 958  # of the vocabulary, not of the text
# %% 2
class PostNorm(EagleDrafter):
    def run(self, step, hidden, ids=None):
        states, drafts = super().run(step, hidden, ids)
        if not len(drafts):
            return states, drafts
        return states, self.model.choose(self.model.norm(states, None)[0])  # fed back as it was
# %% 3
def by_token(after):
    matrix = torch.zeros(64, 128)
    matrix[after, torch.arange(60)] = 1  # the successor, which the output matrix maps on again
    return matrix
